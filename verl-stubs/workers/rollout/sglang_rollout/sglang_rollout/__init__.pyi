from verl.workers.rollout.sglang_rollout import SGLangRollout as SGLangRollout
