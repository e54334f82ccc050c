"""The examples in docstrings of data and rewards say what happens."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "verl.utils.dataset.rl_dataset",
        "verl.workers.reward_manager.function",
        "verl.workers.reward_manager.naive",
    ],
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
