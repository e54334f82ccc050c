from verl.toolkit.rollouts import RolloutSkip as RolloutSkip
