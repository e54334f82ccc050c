"""The examples in docstrings of data and rewards say what happens."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "verl.datasets.rl_dataset",
        "verl.scorers.math_dapo",
        "verl.scorers.math_equality",
        "verl.scorers.parts",
        "verl.scorers.prime_math",
        "verl.scorers.search_r1_like_qa_em",
        "verl.workers.reward_manager.scores",
    ],
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
