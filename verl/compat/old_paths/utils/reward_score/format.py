"""Public address of functions in :mod:`verl.scorers.parts`."""

from verl.scorers.parts import format_reward as format_reward
from verl.scorers.parts import last_tag as last_tag
