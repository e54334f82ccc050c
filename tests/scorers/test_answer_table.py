r"""What each scorer says to an answer: a table of right and wrong ones, and numbers written in many ways."""

import random
from fractions import Fraction

import pytest

from verl.errors import RewardError
from verl.scorers import check_truth, default_compute_score, math_reward
from verl.scorers.math_equality import is_equivalent
from verl.scorers.math_verify_private import load_grader

GSM8K = [
    # truth, response, score
    ("5", "#### 5", 1), ("5", r"#### \$5", 1), ("5", "#### $5", 1), ("5", "#### **5**", 1),
    ("5", "#### **$5.00**", 1), ("5", r"#### \boxed{5}", 1), ("5", r"#### $\boxed{5}$.", 1), ("-5", "#### −5", 1),
    ("-5", "#### –5", 1), ("-5", "#### -$5", 1), ("-5", r"#### -\$5", 1), ("5", r"#### \(5\)", 1),
    ("5", r"#### \text{5}", 1), ("5", "#### `5`", 1), ("5", "#### 5.", 1), ("5", "#### 5.0", 1), ("5", "#### 05", 1),
    ("5", "#### +5", 1), ("5", "#### ５", 1), ("5", "#### 5 apples", 1), ("5", "#### 5%", 1), ("5", "#### 5°", 1),
    ("5", "#### 5€", 1), ("5", "#### £5", 1), ("5", "####\n5", 1), ("5", "#### 5/hour", 1), ("5", "#### 5 – done", 1),
    ("5", "#### 5!", 1), ("5", "#### 4\n#### 5", 1), ("5", "#### 5\n#### the end", 1), ("0.5", "#### .5", 1),
    ("1000", "#### 1,000", 1), ("1000", "#### 1{,}000", 1), ("1000", "#### 1 000", 1), ("1000", r"#### 1\,000", 1),
    ("1000", "#### $1,000.00 in all", 1), ("1,000", "#### 1000", 1), ("100000", "#### 1,00,000", 1), (5, "#### 5", 1),
    (5.0, "#### 5", 1), ("5.0", "#### 5", 1), ("$5", "#### 5", 1), ("5 dollars", "#### 5", 1),
    ("#### 5", "#### 5", 1), ("2+3 = <<2+3=5>>5\n#### 5", "#### 5", 1), (r"\boxed{5}", "#### 5", 1),
    ("−5", "#### -5", 1), ("3", "#### 3/4", 0), ("1", "#### 1e3", 0), ("5", "#### 5:30", 0),
    ("5", "#### 5 million", 0), ("5", "#### 5k", 0), ("5", "#### 5 or 6", 0), ("5", "#### 5-6", 0),
    ("5", "#### 5–6", 0), ("5", "#### 5 to 6", 0), ("5", "#### 5+1", 0), ("5", "#### 5 × 3", 0),
    ("5", r"#### 5\times 3", 0), ("5", "#### 5²", 0), ("5", "#### 5^2", 0), ("5", "#### 5½", 0),
    ("5", "#### 5.5.5", 0), ("3", "#### 3 1/2", 0), ("1", "#### 1,2", 0), ("12", "#### 1,2", 0),
    ("72", "#### 7 2", 0), ("3", "#### 3\n#### 3/4", 0), ("5", r"#### \frac{5}{2}", 0), ("5", "#### -5", 0),
    ("5", "#### 50", 0), ("5", "#### five", 0), ("5", "5", 0), ("5", "#### ", 0), ("5.5", "#### 5.5.5", 0),
    ("0.10000000000000001", "#### 0.1", 0),
]  # fmt: skip
MATH_DAPO = [
    ("073", "Answer: 73", 1), ("73", "Answer: 073", 1), (73.0, "Answer: 73", 1), ("73.0", "Answer: 73", 1),
    ("73", r"Answer: \(73\)", 1), ("73", r"Answer: \[73\]", 1), ("73", "Answer: \\[\n73\n\\]", 1),
    ("-73", "Answer: −73", 1), ("73", "Answer: $$73$$", 1), ("73", "**Answer:** **73**.", 1),
    ("73", "**Answer: $73$**", 1), ("73", "Answer: `73`", 1), ("73", r"Answer: \boxed{073}", 1),
    ("73", r"Answer: \mathbf{73}", 1), ("73", "Answer: 73°", 1), ("73", "Answer: 7\u20093", 1),
    ("1024", "Answer: 1,024", 1), ("1024", "Answer: x = 1{,}024", 1), ("1024", r"Answer: 1\,024", 1),
    ("73", "Answer:\n\n73", 1), ("73", "**Answer**: 73", 1), ("x^2", "Answer: x²", 1), ("5/2", "Answer: 2 1/2", 1),
    ("21/2", "Answer: 2 1/2", 0), (r"\frac{1}{2}", "Answer: 0.5", 1), (r"\frac{1}{2}", "Answer: ½", 1),
    ("1/2", r"Answer: \dfrac12", 1), ("73", "Answer： 73", 1), (r"\sqrt{2}", "Answer: √2", 1),
    (r"2\sqrt{3}", "Answer: 2√3", 1), ("#### 73", "Answer: 73", 1), (r"\boxed{73}", "Answer: 73", 1),
    ("73", "Answer: 74", 0), ("73", "Answer: -73", 0), ("73", "Answer: 730", 0), ("73", "Answer: 7.3", 0),
    ("73", "Answer: 73!", 0), ("73", "Answer: 73/2", 0), ("73", "Answer: 73 or 74", 0),
    ("73", "Answer: 73\nAnswer: 74", 0), ("73", r"\boxed{73}", 0), ("3", "Answer: 1/3", 0),
    ("56", "Answer: 5 points 6", 0), ("56", "Answer: 5 6", 1), ("56", r"Answer: 5^\circ6", 0),
    ("56", r"Answer: \text{5}6", 0), ("1000", "Answer: 1 000 dollars", 1), ("5", "Answer: €5", 1),
    ("0.3333", "Answer: 1/3", 0), ("0", r"Answer: \frac{1}{10^{20}}", 0),
]  # fmt: skip
BOXED = [
    # truth, content of the box, score
    (r"\sqrt{2}", "√2", 1), (r"4\sqrt{2}", "4√2", 1), (r"\sqrt{x+1}", "√(x+1)", 1), (r"\sqrt[3]{5}", "∛5", 1),
    ("x^2", "x²", 1), ("300", "3×10²", 1), ("0.003", "3 × 10⁻³", 1), ("6", "2·3", 1), ("90", "90°", 1),
    (r"\emptyset", r"\varnothing", 1), (r"\emptyset", "∅", 1), ("[1,3]", r"1\le x\le 3", 1),
    ("[1,3]", "1 ≤ x ≤ 3", 1), (r"1\le x\le 3", "[1,3]", 1), (r"(2,\infty)", "x > 2", 1),
    (r"(2,\infty)", r"\{x \mid x>2\}", 1), (r"(-\infty,3]", "(−∞, 3]", 1), ("x_1", "x₁", 1),
    (r"\frac{\pi}{2}", "π/2", 1), (r"\frac{1}{3}", r"0.\overline{3}", 1), ("(1,2)", "（1，2）", 1), ("2,-2", "±2", 1),
    (r"x\neq 3", "x ≠ 3", 1), (r"\alpha+1", "1+α", 1), ("12", "144÷12", 1), (r"\frac{3}{4}", "¾", 1),
    ("50", "50％", 1), ("5", "**5**", 1), ("5", "$5$", 1), ("5", r"\(5\)", 1), ("5", r"\textbf{5}", 1),
    ("5", "{5}", 1), ("5", "５．", 1), ("east", r"\text{East}", 1), ("1000", "1'000", 1), ("1000", "1 000", 1),
    ("1234567", r"1\,234\,567", 1), ("5", "€5", 1), ("1/6", "0.1666...", 1), (r"2\pi", "2pi", 1),
    ("14", "$14$ dollars", 1), ("17", "=17", 1), ("20", "20°C", 1), ("11111", r"11,\! 111", 1),
    ("x=1000", "x = 1 000", 1), ("17", "``17''", 1), ("17", r"\color{red}{17}", 1), (73.0, "73", 1),
    ("#### 5", "5", 1), (r"\boxed{5}", "5", 1), (r"\frac{1}{3}", "0.333333", 1), (r"\sqrt{2}", "1.414214", 1),
    (r"(\frac{1}{3},1)", "(0.333333,1)", 1), (r"x=\frac{1}{3}", "x=0.333333", 1), ("1e-20", r"10^{-20}", 1),
    (0.1 + 0.2, "0.3", 1), (r"\frac{1}{20!}", "1/20!", 1), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}", 1),
    (r"\frac{2^{99}-1}{2^{100}}", r"\frac{0}{2^{100}}", 0), (r"\frac{2^{99}-1}{2^{100}}", r"\frac12", 0),
    ("1/20!", "1/19!", 0), (r"6.63\cdot10^{-34}", r"1.38\cdot10^{-23}", 0), ("0.0000002", "0.0000001", 0),
    ("10^{-20}", "0", 0), ("0", "10^{-20}", 0), (r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot10^{-20}", 0),
    (r"10^{200}", r"\sqrt{10^{400}+1}", 0), ("(1,10^{-20})", "(1,10^{-21})", 0), ("[0,10^{-20}]", "[0,10^{-21}]", 0),
    (r"\{1,10^{-20}\}", r"\{1,10^{-21}\}", 0), ("x=10^{-20}", "x=10^{-21}", 0), ("x<10^{-20}", "x<10^{-21}", 0),
    ("y=10^{-20}x", "y=10^{-21}x", 0),
    (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}", 0),
    ("10^{-20}x", "10^{-21}x", 0), (r"\frac{1}{3}", "0.3333", 0), ("0.1234567", "0.1234568", 0), ("3", "3.000001", 0),
    ("12345678.5", "12345678.6", 0), ("x^2=-1", "x^2=-2", 0), ("1<x<3", "1,3", 0), (r"\{1,3\}", "(1,3)", 0),
    ("(1,3)", r"\{1,3\}", 0), ("[1,3]", "1<x<3", 0), (r"\sqrt{2}", "√3", 0), ("x^2", "x³", 0), ("300", "3×10³", 0),
    ("-1", "2–3", 0), (r"\frac{1}{3}", r"0.\overline{6}", 0), ("12", "1 2", 0), ("x+12", "x+1 2", 0),
    ("1/3", "0.332...", 0), ("1.2", "1,2", 0), ("5", "5 million", 0), ("4", r"\prod_{i=1}^{1000000} i", 0),
]  # fmt: skip


def wrong_rows(score, rows):
    """Rows with another score than the table's."""
    return [row for row in rows if score(row[1], row[0]) != row[2]]


def test_gsm8k():
    assert wrong_rows(lambda text, truth: default_compute_score("gsm8k", text, truth), GSM8K) == []


def test_math_dapo():
    assert wrong_rows(lambda text, truth: default_compute_score("aime", text, truth)["acc"], MATH_DAPO) == []
    check_truth("aime", 10**400)


def test_boxed():
    assert wrong_rows(lambda text, truth: math_reward.compute_score(rf"\boxed{{{text}}}", truth), BOXED) == []


def test_a_response_that_is_the_answer_needs_no_mark_in_numina():
    bare = [
        ("0.5", r"\frac{1}{2}", 1),
        ("(x+1)^2", "x^2 + 2x + 1", 1),
        ("2", "It is 2", 0),
        ("2", "$2$", 1),
        ("2", "Perhaps $2$", 0),
        ("2", "", 0),
        ("2", "3", 0),
    ]
    assert wrong_rows(lambda text, truth: default_compute_score("numina_cn_k12", text, truth), bare) == []


@pytest.mark.parametrize("source", ["gsm8k", "math_dapo", "lighteval/MATH", "numina_cn_k12", "hiyouga/geometry3k"])
@pytest.mark.parametrize(
    "truth", [float("nan"), float("inf"), None, True, "", "  ", "nan", "$$", [], ["5"], {"target": 5}]
)
def test_a_truth_that_no_answer_could_equal_is_an_error(source, truth):
    with pytest.raises(RewardError, match=r"ground.truth"):
        check_truth(source, truth)
    with pytest.raises(RewardError, match=r"ground.truth|compares the"):
        default_compute_score(source, r"#### 5 \boxed{5} Answer: 5", truth)


@pytest.mark.parametrize(
    ("source", "truth"),
    [("gsm8k", "five"), ("gsm8k", "1/2"), ("gsm8k", "#### five"), ("countdown", {"target": 9.5, "numbers": [1]}),
     ("countdown", {"target": 9, "numbers": [1, float("nan")]}), ("searchR1_nq", {"target": [" "]}), ("apps", "{}"),
     ("llm_judge", float("nan")), ("lighteval/MATH", r"\boxed{5"), ("math_dapo", r"\frac{1}{"),
     ("numina_cn_k12", "5}")],
)  # fmt: skip
def test_a_truth_that_its_scorer_cannot_read_is_an_error(source, truth):
    with pytest.raises(RewardError, match=r"ground.truth"):
        check_truth(source, truth)


def written(draw, value):
    """A rational number in one of many ways, as text with or without wrappers."""
    sign, (above, below) = "-" if value < 0 else "", (abs(value.numerator), value.denominator)
    whole, rest = divmod(above, below)
    ways = [f"{sign}{above}/{below}", rf"{sign}\frac{{{above}}}{{{below}}}", rf"\dfrac{{{sign}{above}}}{{{below}}}",
            rf"{sign}\tfrac{{{2 * above}}}{{{2 * below}}}"]  # fmt: skip
    if whole and rest:
        ways += [f"{sign}{whole} {rest}/{below}", rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"]
    places = next((n for n in range(7) if 10**n % below == 0), None)
    if places is not None:
        digits = f"{sign}{whole}" + (f".{rest * 10**places // below:0{places}d}" if places else "")
        ways += [digits, f"{digits}e0", rf"{digits}\times 10^{{0}}", f"{sign}{abs(value * 1000).numerator}e-3"]
        ways = [way for way in ways if "e-3" not in way or (value * 1000).denominator == 1]
        ways += [f"{sign}{whole:,}" + digits.partition(".")[1] + digits.partition(".")[2], f"{digits}°"]
    text = draw.choice(ways).replace("-", draw.choice("-−"), 1)
    return draw.choice(["{}", "${}$", r"\({}\)", "**{}**", " {} ", "{}.", r"\boxed{{{}}}", r"\text{{{}}}"]).format(text)


def test_numbers_are_equal_however_they_are_written_and_others_are_not():
    draw = random.Random(29)
    for _ in range(1500):
        value = Fraction(draw.randint(-(10 ** draw.randint(1, 9)), 10**6), draw.choice([1, 2, 3, 7, 8, 10, 1000, 999]))
        first, second = written(draw, value), written(draw, value)
        assert is_equivalent(first, second), (first, second)
        other = value + Fraction(draw.choice([-1, 1]), 10 ** draw.randint(0, 30) * draw.choice([1, 3]))
        pair = [rf"\frac{{{each.numerator}}}{{{each.denominator}}}" for each in (value, other)]
        assert not is_equivalent(*pair), pair
        places = draw.randint(0, 12)
        first, second = (f"{value.numerator + step}e-{places}" for step in (0, draw.choice([-1, 1])))
        assert not is_equivalent(first, second), (first, second)


def test_the_grader_of_the_library_is_not_changed_for_others():
    import math_verify.grader

    assert is_equivalent(r"\sqrt{8}", r"2\sqrt{2}")
    assert math_verify.grader.sympy_numeric_eq.__module__ == "math_verify.grader"
    assert load_grader() is not math_verify.grader
