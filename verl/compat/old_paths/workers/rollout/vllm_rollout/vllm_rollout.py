"""Public path of vLLM as rollout engine, :mod:`verl.workers.rollout.vllm_rollout`."""

from verl.workers.rollout.vllm_rollout import vLLMAsyncRollout as vLLMAsyncRollout
from verl.workers.rollout.vllm_rollout import vLLMRollout as vLLMRollout
