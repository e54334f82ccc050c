"""Old address of the function that runs a program against tests."""

from verl.scorers.prime_code import run_test as run_test
