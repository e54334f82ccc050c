"""The examples in docstrings of data and rewards say what happens."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "verl.datasets.rl_dataset",
        "verl.utils.reward_score.math_dapo",
        "verl.utils.reward_score.math_equality",
        "verl.utils.reward_score.parts",
        "verl.utils.reward_score.prime_math",
        "verl.utils.reward_score.search_r1_like_qa_em",
        "verl.workers.reward_manager.scores",
    ],
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
