"""Old address of the function that runs a program against tests."""

from verl.utils.reward_score.prime_code import run_test as run_test
