"""Old address of the scorer of MATH."""

from verl.scorers.math_reward import compute_score as compute_score
from verl.scorers.math_reward import last_boxed_only_string as last_boxed_only_string
from verl.scorers.math_reward import remove_boxed as remove_boxed
