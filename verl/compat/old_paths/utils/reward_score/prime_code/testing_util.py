"""Old address of the function that runs a program against tests."""

from verl.plugins.sandbox.prime_code import run_test as run_test
