"""Public address of functions in :mod:`verl.utils.reward_score.parts`."""

from verl.utils.reward_score.parts import cosine_length_reward as cosine_length_reward
from verl.utils.reward_score.parts import soft_overlong_penalty as soft_overlong_penalty
