"""Countdown: expressions read without running anything, numbers counted, arithmetic exact."""

import itertools
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.scorers.countdown import compute_score, evaluate, extract_solution

TRUTH = {"target": 9, "numbers": [1, 2, 3]}


@pytest.mark.parametrize(
    "expression, value, numbers",
    [
        ("(1 + 2) * 3", 9, [1, 2, 3]),
        ("1+2*3", 7, [1, 2, 3]),
        ("8 / 2 / 2", 2, [8, 2, 2]),
        ("1 - 2 - 3", -4, [1, 2, 3]),
        ("1 / 3 * 3", 1, [1, 3, 3]),  # 0.9999999999999999 or 1.0 with floats, 1 exactly
        ("2 / 4", Fraction(1, 2), [2, 4]),
        ("-3 + 5", 2, [3, 5]),
        ("((7))", 7, [7]),
        ("1 +\n2", 3, [1, 2]),
        (r"$8 \div (2 − 1) × 3 \cdot 4$.", 96, [8, 2, 1, 3, 4]),
    ],
)
def test_evaluate(expression, value, numbers):
    assert evaluate(expression) == (value, numbers)


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "()", "1 +", "1 2", "(1", "1)", "1 / 0", "1 / (2 - 2)", "2 ** 3", "7 // 2", "1.5 + 2", "1e3", "0x10",
        "x", "1 + a", "True", "1 = 1", "1, 2", "3(4)", "[1]", "1 if 2 else 3", "__import__('os')", "1_000", "01",
        "٣ + 1", "9" * 300, "(" * 150 + "1" + ")" * 150, "1+" * 200 + "1",
    ],
)  # fmt: skip
def test_what_is_no_expression(expression):
    assert evaluate(expression) is None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>1+2</answer>", "1+2"),
        ("<answer> 1 </answer> or <answer>\n2\n</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("</answer><answer>", None),
        ("", None),
    ],
)
def test_extract(text, answer):
    assert extract_solution(text) == answer


@pytest.mark.parametrize(
    "answer, score",
    [
        ("<answer>(1 + 2) * 3</answer>", 1.0),
        ("<answer>3*(2+1)</answer>", 1.0),
        ("<answer>3 * 3</answer>", 0.1),  # 3 twice, 1 and 2 never
        ("<answer>9</answer>", 0.1),
        ("<answer>1 + 2 + 3</answer>", 0.1),  # the right numbers, another value
        ("<answer>(1 + 2) * 3 * 1</answer>", 0.1),  # 1 twice
        ("<answer>(1 + 2) * 3 = 9</answer>", 0.0),
        ("<answer>(1 + 2) * 3</answer><answer>1</answer>", 0.1),
        ("(1 + 2) * 3", 0.0),
    ],
)
def test_score(answer, score):
    assert compute_score(answer, TRUTH, format_score=0.1) == score
    assert compute_score(answer, TRUTH) == (1.0 if score == 1.0 else 0.0)


def test_equal_numbers_are_counted():
    truth = {"target": 8, "numbers": [2, 2, 4]}
    assert compute_score("<answer>2 + 2 + 4</answer>", truth) == 1.0
    assert compute_score("<answer>2 + 4 + 2</answer>", truth) == 1.0
    assert compute_score("<answer>2 * 4</answer>", truth) == 0.0
    assert compute_score("<answer>4 + 4</answer>", truth) == 0.0


def test_exact_arithmetic_reaches_what_floats_miss():
    # 6 / (1 - 3/4) = 24; with floats the chain 1/49*49 is 0.9999999999999999.
    assert compute_score("<answer>6 / (1 - 3 / 4)</answer>", {"target": 24, "numbers": [1, 3, 4, 6]}) == 1.0
    assert compute_score("<answer>1 / 49 * 49</answer>", {"target": 1, "numbers": [1, 49, 49]}) == 1.0


@pytest.mark.parametrize("truth", [None, 9, "9", {"target": 9}, {"numbers": [1]}, {"target": "x", "numbers": [1]}])
def test_a_ground_truth_of_another_form(truth):
    with pytest.raises(RewardError, match="ground_truth is"):
        compute_score("<answer>1</answer>", truth)


@given(st.text(st.sampled_from("0123456789+-*/() \n.e_xj**//<>=,[]'\""), max_size=300))
@example("(" * 250)
@example("-" * 250 + "1")
@example("9" * 255)
@example("9*" * 127 + "9")
@example("1/" * 127 + "3")
def test_any_text_is_read_or_not_in_bounded_time(text):
    started = time.perf_counter()
    result = evaluate(text)
    assert time.perf_counter() - started < 10
    assert result is None or isinstance(result[0], Fraction)


@given(st.text(max_size=200))
def test_any_response_gets_a_score(text):
    assert compute_score(f"<answer>{text}</answer>", TRUTH, format_score=0.1) in (0.0, 0.1, 1.0)
    assert compute_score(text, TRUTH) in (0.0, 1.0)


def test_many_open_tags_take_no_time():
    started = time.perf_counter()
    assert compute_score("<answer>" * 100_000, TRUTH) == 0.0
    assert time.perf_counter() - started < 10


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.data())
def test_against_python_where_python_is_exact(numbers, data):
    # Oracle: Python's own evaluation over Fractions, of expressions without parentheses.
    operations = data.draw(st.lists(st.sampled_from("+-*/"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    tokens = [str(numbers[0]), *itertools.chain(*zip(operations, map(str, numbers[1:]), strict=True))]
    exact = [token if token in "+-*/" else f"Fraction({token})" for token in tokens]
    try:
        expected = (eval(" ".join(exact), {"Fraction": Fraction}), numbers)
    except ZeroDivisionError:
        expected = None
    assert evaluate(" ".join(tokens)) == expected
