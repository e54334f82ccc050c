"""Parts of rewards: form, length, repetition, and their sum."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.scorers.parts import (
    cosine_length_reward,
    format_reward,
    last_tag,
    repetition_penalty,
    soft_overlong_penalty,
    weighted_sum,
)


@pytest.mark.parametrize(
    "text, content",
    [
        ("<answer> 3 </answer>", "3"),
        ("<answer>3</answer><answer>4</answer>", "4"),
        ("<answer>3</answer><answer>4", "3"),
        ("<answer><answer>4</answer>", "4"),
        ("</answer>3<answer>", None),
        ("<Answer>3</Answer>", None),
        ("", None),
    ],
)
def test_last_tag(text, content):
    assert last_tag(text) == content
    assert last_tag(text.replace("answer", "解"), "解") == content


@pytest.mark.parametrize(
    "text, score, alone",
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" <think>a</think>\n\n<answer>b</answer>\n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("so <think>a</think><answer>b</answer>", 1, 0),
        ("<think>a</think>so<answer>b</answer>", 1, 0),
        ("<think>a</think><answer>b</answer>so", 1, 0),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("<think>a<answer>b</answer></think>", 0, 0),
        ("<think>a<answer>b</think></answer>", 0, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0, 0),
        ("<think>a</think><answer>b</answer></answer>", 0, 0),
        ("</think>a<think><answer>b</answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(text, score, alone):
    assert format_reward(text) == score
    assert format_reward(text, nothing_outside=True) == alone


@pytest.mark.parametrize("tags", ["think", [], ["think", "think"]])
def test_tags_that_make_no_sense(tags):
    with pytest.raises(ConfigError, match="list of different names"):
        format_reward("", tags)


@pytest.mark.parametrize(
    "length, penalty",
    [
        (0, 0.0),
        (80, 0.0),  # 100 - 20
        (81, -0.1),  # 1/20 of 2
        (90, -1.0),
        (95, -1.5),
        (100, -2.0),
        (150, -2.0),
    ],
)
def test_soft_overlong(length, penalty):
    assert soft_overlong_penalty(length, max_length=100, buffer=20, factor=2.0) == pytest.approx(penalty)


@pytest.mark.parametrize("wrong", [{"buffer": 0}, {"buffer": 101}, {"factor": -1.0}])
def test_soft_overlong_settings(wrong):
    with pytest.raises(ConfigError, match="overlong"):
        soft_overlong_penalty(1, **({"max_length": 100, "buffer": 20} | wrong))


@pytest.mark.parametrize(
    "right, length, reward",
    [
        (True, 0, 2.0),
        (True, 50, 1.5),
        (True, 25, 1.0 + (1 + math.sqrt(0.5)) / 2),  # cos(π/4) = √½
        (True, 100, -10.0),
        (False, 0, -10.0),
        (False, 50, -5.0),
        (False, 75, -10.0 * (1 - math.sqrt(0.5)) / 2),  # cos(3π/4) = -√½
        (False, 100, -10.0),
    ],
)
def test_cosine(right, length, reward):
    assert cosine_length_reward(right, length, 100) == pytest.approx(reward)


@given(st.integers(0, 98))
def test_cosine_prefers_short_right_answers_and_long_wrong_ones(length):
    assert cosine_length_reward(True, length, 100) > cosine_length_reward(True, length + 1, 100)
    assert cosine_length_reward(False, length, 100) < cosine_length_reward(False, length + 1, 100)
    assert cosine_length_reward(True, length, 100) > 1.0 > 0.0 > cosine_length_reward(False, length, 100)


def test_cosine_settings():
    assert cosine_length_reward(True, 3, 3, exceeded=-7.0) == -7.0
    with pytest.raises(ConfigError, match="max_length=0"):
        cosine_length_reward(True, 1, 0)


@pytest.mark.parametrize(
    "text, n, penalty",
    [
        ("a b c d", 2, 0.0),
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a a a", 2, -2 / 3),
        ("A a, A a,", 2, -2 / 5),  # aa a, ,a aa a,
        ("the same the same the same", 2, -3 / 5),  # ts st ts st ts
        ("好的好的", 2, -1 / 3),  # 好的 的好 好的
        ("ดดด", 1, -2 / 3),
        ("straße straße", 1, -1 / 2),
        ("Yes yes YES", 1, -2 / 3),
        ([7, 8, 7, 8, 7], 2, -2 / 4),
        ("a b", 2, 0.0),
        ("", 3, 0.0),
    ],
)
def test_repetition(text, n, penalty):
    assert repetition_penalty(text, ngram_size=n) == pytest.approx(penalty)
    assert repetition_penalty(text, ngram_size=n, max_penalty=0.5) == pytest.approx(penalty / 2)


@given(st.text(), st.integers(1, 5))
def test_repetition_stays_in_its_range(text, n):
    assert -1 < repetition_penalty(text, n) <= 0
    assert repetition_penalty(list(range(len(text))), n) == 0


@pytest.mark.parametrize("wrong", [{"ngram_size": 0}, {"max_penalty": -1.0}])
def test_repetition_settings(wrong):
    with pytest.raises(ConfigError, match="repetition_penalty"):
        repetition_penalty("a", **wrong)


def test_weighted_sum():
    # 0.9 · 1 + 0.1 · 0.5 - 2 · 0.25 = 0.45
    assert weighted_sum({"accuracy": (0.9, 1.0), "format": (0.1, 0.5), "length": (-2.0, 0.25)}) == {
        "score": pytest.approx(0.45),
        "accuracy": 1.0,
        "format": 0.5,
        "length": 0.25,
    }


@pytest.mark.parametrize("wrong", [{}, {"score": (1.0, 1.0)}])
def test_weighted_sum_refuses(wrong):
    with pytest.raises(ConfigError, match="weighted_sum"):
        weighted_sum(wrong)
