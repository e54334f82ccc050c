"""Public address of functions in :mod:`verl.scorers.parts`."""

from verl.scorers.parts import cosine_length_reward as cosine_length_reward
from verl.scorers.parts import soft_overlong_penalty as soft_overlong_penalty
