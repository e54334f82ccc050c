"""Public path of vLLM as rollout engine, :mod:`verl.workers.rollout.vllm_rollout`."""

from verl.base.doors import old_names
from verl.workers.rollout.vllm_rollout import vLLMAsyncRollout as vLLMAsyncRollout
from verl.workers.rollout.vllm_rollout import vLLMRollout as vLLMRollout

__getattr__ = old_names(__name__)
