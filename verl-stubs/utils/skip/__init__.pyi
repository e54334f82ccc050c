from verl.compat.toolkit.rollouts import RolloutSkip as RolloutSkip
