"""MATH: what a box holds, equal values, and comparisons that would never end."""

import threading

import pytest

from verl.errors import RewardError
from verl.utils.killable_pool import Budget
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.math_reward import compute_score, is_equivalent, last_boxed
from verl.workers.reward_manager.function import RewardFunction, Sample


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so $\boxed{3}$.", "3"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"$\boxed 7$ is it", "7"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
        ("3", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    "answer, truth, equal",
    [
        ("3", "3", True),
        (r"\frac{1}{2}", "0.5", True),
        ("1/2", r"\frac12", True),
        ("x + 1", "1+x", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("1,000", "1000", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("(1, 2)", "(1,2)", True),
        (r"\text{Monday}", "Monday", True),
        ("3", "4", False),
        ("(1, 2)", "(2, 1)", False),
        (r"\frac{1}{2}", "2", False),
        ("-3", "3", False),
        (r"\frac{", "3", False),
        ("hello", "3", False),
        ("9" * 3000, "3", False),
    ],
)
def test_equal_values(answer, truth, equal):
    assert is_equivalent(answer, truth) is equal


def test_score():
    assert compute_score(r"thus \boxed{0.75}", r"\frac{3}{4}") == 1.0
    assert compute_score(r"thus \boxed{0.75}", r"the answer is $\boxed{\frac{3}{4}}$") == 1.0
    assert compute_score(r"thus \boxed{0.7}", r"\frac{3}{4}") == 0.0
    assert compute_score(r"thus \boxed{0.7}", r"\frac{3}{4}", format_score=0.1) == 0.1
    assert compute_score("thus 0.75", r"\frac{3}{4}", format_score=0.1) == 0.0
    for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        assert default_compute_score(source, r"\boxed{4}", "2+2") == 1.0


def test_it_works_in_a_thread():
    # The library's own time limits are signals, which only a main thread can take.
    results = []
    threads = [threading.Thread(target=lambda: results.append(is_equivalent(r"\frac{2}{4}", "0.5"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3


def test_a_comparison_that_never_ends_is_a_timeout_and_not_a_zero(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "math_verify")  # loaded before the time of a sample begins
    function = RewardFunction(default_compute_score, {}, budget=Budget(timeout_s=5.0))
    answers = [r"\boxed{\sum_{k=1}^{9999} \sin(k)}", r"\boxed{\frac{6}{2}}"]
    scores = function.score_samples([Sample("math_reward", answer, "3", {}) for answer in answers])
    assert [(score.status, score.value) for score in scores] == [("timeout", 0.0), ("ok", 1.0)]


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "3^{2^{40}}", "10^{10^{10}}", "(1+x)^{100000}", "x^{-123456}", "2^{ 3 ^{ 99 } }"]
)
def test_a_power_that_cannot_be_worked_out_is_wrong(answer: str):
    # Not undecided: then it would cost a policy nothing to write one.
    assert compute_score(rf"\boxed{{{answer}}}", "3") == 0.0
    assert compute_score(rf"\boxed{{{answer}}}", answer) == 1.0  # the same text is the same value


@pytest.mark.parametrize(
    ("answer", "truth"), [("2^{3^2}", "512"), ("2^{2^{3}}", "256"), ("10^{-3}", "0.001"), ("2^{10}", "1024")]
)
def test_powers_that_can_be_worked_out_are(answer: str, truth: str):
    assert compute_score(rf"\boxed{{{answer}}}", truth) == 1.0


def test_a_ground_truth_that_cannot_be_read():
    with pytest.raises(RewardError, match="ground truth '' cannot be read"):
        compute_score(r"\boxed{3}", "")
