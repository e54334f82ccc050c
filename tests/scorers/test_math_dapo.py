"""DAPO's competition mathematics: what is compared, and ±1."""

import pytest

from verl.scorers import default_compute_score
from verl.scorers.math_dapo import compute_score, normalize_final_answer


@pytest.mark.parametrize(
    "text, normal",
    [
        ("42", "42"),
        ("1,024", "1024"),
        ("1{,}024", "1024"),
        (r"1,\!024", "1024"),
        ("x = 5", "5"),
        (r"5\text{ cm}", "5"),
        ("5 dollars", "5"),
        (r"\$5", "5"),
        (r"30^\circ", "30"),
        (r"30^{\circ}", "30"),
        ("90 degrees", "90"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("the value is $7$ here", "7"),
        ("$7$", "7"),
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\text{east}", "east"),
        (r"\textbf{B}", "B"),
        (r"1,\text{and}2", "1,2"),
        ("(1, 2)", "(1,2)"),
        ("1,2,x", "1,2,x"),
        ("1,2", "1,2"),
        ("12,345,678", "12345678"),
        ("", ""),
        ("$", ""),
        (r"\boxed{", r"\boxed{"),
    ],
)
def test_normalize(text, normal):
    assert normalize_final_answer(text) == normal


@pytest.mark.parametrize(
    "response, truth, right, pred",
    [
        ("Answer: 34", "34", True, "34"),
        ("Answer: 34", 34, True, "34"),
        ("answer : $34$", "34", True, "34"),
        ("Answer: 12\nno\nAnswer: 34", "34", True, "34"),
        ("**Answer:** 34", "34", True, "34"),
        ("Answer: 34.", "34", True, "34"),
        ("Answer: 34,", "34", True, "34"),
        ("**Answer: 34**;", "34", True, "34"),
        ("Answer: 3!", "3", False, "3!"),
        (r"Answer: \boxed{34}", r"\boxed{34}", True, "34"),
        ("It is 34", "34", False, "[INVALID]"),
        (r"\boxed{34}", "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
    ],
)
def test_the_answer_line(response, truth, right, pred):
    expected = {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
    assert compute_score(response, truth) == expected
    assert default_compute_score("aime2024", response, truth) == expected


def test_only_the_last_300_characters_are_read():
    # "Answer: 34" has 10 characters: with 290 more it lies just within, with 291 its A is cut off.
    assert compute_score("Answer: 34\n" + "x" * 289, "34")["acc"] is True
    assert compute_score("Answer: 34\n" + "x" * 290, "34")["acc"] is False


@pytest.mark.parametrize(
    "response, truth, right, pred",
    [
        (r"so \boxed{34}", "34", True, "34"),
        (r"so \boxed{34}", r"\boxed{34}", True, "34"),
        (r"\boxed{34} or \boxed{12}", "34", False, "12"),
        (r"\boxed{34.0}", "34", False, "34.0"),
        ("Answer: 34", "34", False, "[INVALID]"),
        (r"\boxed{34" + "x" * 300, "34", False, "[INVALID]"),
    ],
)
def test_strict_box(response, truth, right, pred):
    scored = compute_score(response, truth, strict_box_verify=True)
    assert scored == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        ("6=5", "5", False), ("x=6=5", "5", False), (r"5\text{ km}", r"5\text{ m}", False), (r"\$5", "5 cents", False),
        ("x = 5", "5", True), ("m + n = 33", "33", True), (r"5\text{ km}", "5", True), ("5=5.0", "5", True),
    ],
)  # fmt: skip
def test_numbers_and_units_that_normalisation_removes_still_count(answer, truth, is_right):
    assert compute_score(f"Answer: {answer}", truth)["acc"] is is_right
