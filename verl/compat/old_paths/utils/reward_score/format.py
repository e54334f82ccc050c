"""Public address of functions in :mod:`verl.utils.reward_score.parts`."""

from verl.utils.reward_score.parts import format_reward as format_reward
from verl.utils.reward_score.parts import last_tag as last_tag
