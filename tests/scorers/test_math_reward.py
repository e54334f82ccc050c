"""MATH: what a box holds, equal values, and comparisons that would never end."""

import importlib
import threading

import pytest

from verl.errors import RewardError
from verl.scorers import default_compute_score, math_dapo, math_reward
from verl.scorers.math_equality import is_equivalent, last_boxed
from verl.scorers.math_reward import compute_score


@pytest.mark.parametrize(
    "text, box, content",
    [
        (r"so $\boxed{3}$.", r"\boxed{3}", "3"),
        (r"\boxed{1} or \boxed{ \{1, 2\} }", r"\boxed{ \{1, 2\} }", r" \{1, 2\} "),
        (r"\fbox{x} y", r"\fbox{x}", "x"),
        (r"$\boxed 7$ is it", r"\boxed 7", "7"),
        (r"\boxed{\frac{1}{2}", None, None),
        ("3", None, None),
    ],
)
def test_boxes_as_preprocessing_scripts_read_them(text, box, content):
    for module in (math_reward, math_dapo, importlib.import_module("verl.utils.reward_score.math")):
        assert module.last_boxed_only_string(text) == box
        if box is None:
            with pytest.raises(ValueError, match=r"is no .*boxed"):
                module.remove_boxed(box)
        else:
            assert module.remove_boxed(box) == content


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


@pytest.mark.parametrize(
    ("answer", "truth"), [("2^{3^2}", "512"), ("2^{2^{3}}", "256"), ("10^{-3}", "0.001"), ("2^{10}", "1024")]
)
def test_powers_that_can_be_worked_out_are(answer: str, truth: str):
    assert compute_score(rf"\boxed{{{answer}}}", truth) == 1.0


def test_a_ground_truth_that_cannot_be_read():
    with pytest.raises(RewardError, match=r"ground truth '\$\$' cannot be read"):
        compute_score(r"\boxed{3}", "$$")
