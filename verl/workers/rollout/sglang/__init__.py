"""The SGLang engine, in this process or behind HTTP; see :mod:`verl.workers.rollout.sglang_rollout`."""
