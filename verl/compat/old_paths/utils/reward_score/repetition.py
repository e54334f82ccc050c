"""Public address of functions in :mod:`verl.utils.reward_score.parts`."""

from verl.utils.reward_score.parts import repetition_penalty as repetition_penalty
