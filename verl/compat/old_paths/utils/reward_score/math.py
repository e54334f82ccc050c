"""Old address of the scorer of MATH."""

from verl.utils.reward_score.math_reward import compute_score as compute_score
from verl.utils.reward_score.math_reward import last_boxed_only_string as last_boxed_only_string
from verl.utils.reward_score.math_reward import remove_boxed as remove_boxed
