"""Public address of functions in :mod:`verl.utils.reward_score.parts`."""

from verl.utils.reward_score.parts import weighted_sum as weighted_sum
