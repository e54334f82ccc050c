"""Public path of SGLang as rollout engine, :mod:`verl.workers.rollout.sglang_rollout`."""

from verl.workers.rollout.sglang_rollout import SGLangRollout as SGLangRollout
