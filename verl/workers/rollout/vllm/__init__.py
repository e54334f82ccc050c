"""The vLLM engine, in this process or behind HTTP; see :mod:`verl.workers.rollout.vllm_rollout`."""
