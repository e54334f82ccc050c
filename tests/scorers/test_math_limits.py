r"""No short answer keeps a mathematics scorer busy: it is decided, as wrong, and not given up as a failed sample."""

import itertools
import random
import signal
import sys

import pytest

from tests.scorers.test_math_equality import EQUAL, TOO_KIND, UNEQUAL
from verl.scorers import geo3k, math_reward, prime_math
from verl.scorers.math_equality import canonical, is_equivalent, readings
from verl.scorers.math_limits import MAX_STEPS, is_text_bounded, limited


def nested(opening, inner, closing, depth):
    return opening * depth + inner + closing * depth


HANGING = [
    # factorials and powers
    "5!!!", "5!!!!", "((5!)!)!", "9999999999!", "10^9!", "10^{10}_{5}!", "(5!!!,2)", "5!!!=x",
    "9^{9^{9^9}}", "(9^9)^{(9^9)}", "2^{2^{2^{2^2}}}", "10^{-99999999}", "0.1^{99999999}", r"\frac{9^{99999999}}{3}",
    r"9^{\frac{9^9}{1}}", "(9^{9^{9^9}},2)", r"[2,9^{9^{9^9}})", r"7\mod 9^{9^9}", r"\lfloor 10^{10^{10}}\rfloor",
    nested("e^{", "2", "}", 6), r"\exp(\exp(\exp(\exp(9))))", r"\cosh(\cosh(\cosh(99)))",
    "x^{x^{x^{x^{x^{x}}}}}", "(x+1)^{900}", "(x+y)^{9999}", r"\sqrt[\pi]{\cos^{1000} a}", r"\sqrt[10^9]{x+1}",
    r"\begin{pmatrix}9&2\\3&4\end{pmatrix}^{999999}",
    # a factor of a logarithm becomes the exponent of its argument
    r"{\dbinom{1000}{9}\log_{e} 99999}", r"100000000\ln 7", r"\frac{10^{20}}{3}\ln 7", r"\frac{\ln 7}{10^{-9}}",
    r"123456789012(\ln 7+1)", r"\sqrt{10^{18}}\log 7", r"20!\ln(7)",
    # operations that are carried out while the text is parsed, or without end
    r"\binom{999999999}{99999999}", r"\binom{0.333}{123456789}", r"\gcd(10^{10^{10}},3)",
    r"\binom{1000-0.333}{\pi}-n", r"\dbinom{999.5}{x}", r"\binom{x}{\frac{1}{3}}", r"{0.5 \choose 3.5}-n",
    r"\sqrt{10^{2999}+1}", r"\prod_{i=1}^{1000000} i", r"\binom{e}{x}", r"{123456789 \choose n}", r"\binom{999}{n}",
    r"\operatorname{lcm}(9^{9^9},2)", r"\operatorname{zeros}(99999,99999)", r"\Gamma(999999999)",
    r"\sum_{k=1}^{10^9}k!", r"\prod_{k=1}^{9}" * 8 + "k", r"\int" * 12 + "x" + "dx" * 12, r"\lim_{x\to 0}x^{x^x}",
    # what the grammar can read in many ways
    nested("{1", "5", "}", 16), nested("(", "5", ")", 50), nested("x_{", "1", "}", 16), nested("|", "5", "|", 50),
    nested(r"\frac{", "1", "}{2}", 16), nested(r"1+\frac{1}{", "2", "}", 16), nested(r"\sqrt[3]{", "2", "}", 16),
    r"\log" * 7 + " 5", nested(r"\log(", "5", ")", 7), r"\sin " * 12 + "5", nested(r"\sin(", "5", ")", 12),
    "1" + "/2" * 20, "1" + ",1" * 900, "x" * 1000, "(1,2)" + r"\cup(3,4)" * 60,
]  # fmt: skip

HARD = [
    r"\frac1{\sqrt2+\sqrt3+\sqrt5+\sqrt7}", r"\tan(\tan(\tan(10)))", "x^9+y^9+z^9=1", "(x+y+z+w)^{50}",
    r"\ln(1000000000000000003000000000000000000000391)", "0." + "3" * 1900, "9" * 1900,
]  # fmt: skip
"""Answers whose comparison ends, by itself or after ``MAX_STEPS``."""

LARGE = [
    "2^{2024}", "100!", "10^{100}", r"\binom{100}{50}", "(x+1)^{10}", r"2^{100}+3^{100}", "e^{x^2+1}", "2^{n+1}-2",
    r"\binom{n+1}{2}", r"\dbinom 52", r"{n \choose k-1}",
    r"\left(2^{100},3^{100}\right)", r"\frac{1}{1+\frac{1}{2+\frac{1}{3+\frac{1}{4}}}}", r"\log(\sin(x))",
    r"30000\ln 7", r"\frac{\ln 2}{5730}", r"5\log_{2} 10^{6}", r"\frac{\ln(10^{20})}{2}", r"10^6\ln x",
    r"\ln 10^{20}+10^{20}",
    r"\left(\frac{-b+\sqrt{b^2-4ac}}{2a},0\right)", r"\frac{(2n)!}{n!(n+1)!}", r"x^{\frac{1}{2}}e^{-x}",
]  # fmt: skip
"""Answers that are compared by value although they have powers, factorials or nesting."""


def atoms_and_forms(draw, depth):
    def inner():
        return atoms_and_forms(draw, depth - 1)

    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["1", "2", "9", "1000", "0.5", "x", "n", "e", r"\pi", r"\infty", "10^{10}", "123456789"])
    form = draw.choice(
        ["(@)", "{@}", "@^{@}", "@!", r"\frac{@}{@}", r"\sqrt{@}", r"\sqrt[@]{@}", r"\log @", r"\sin(@)", "@+@", "@@",
         r"@\cdot @", "(@,@)", "[@,@)", r"\{@,@\}", "@=@", "@<@", r"\left|@\right|", r"\binom{@}{@}", r"\tan @", r"@\%",
         r"\begin{pmatrix}@&@\\@&@\end{pmatrix}", "@/@", "@^@", r"\cos^{@} @", "e^{@}", r"\text{@}", "@_{@}",
         r"\lfloor @\rfloor", r"@\pm @", r"@\cup @", "{@", "@}", "@)"]
    )  # fmt: skip
    return "".join(inner() if character == "@" else character for character in form)


def random_answers(seed, count):
    draw = random.Random(seed)
    texts = (atoms_and_forms(draw, draw.randint(1, 7)) for _ in itertools.count())
    return list(itertools.islice((text for text in texts if len(text) <= 200), count))


@pytest.fixture
def no_hang():
    """End a comparison that takes a hundred times as long as it should."""

    def hung(*_):
        pytest.fail("the comparison does not end")

    before, timer = signal.signal(signal.SIGALRM, hung), signal.getitimer(signal.ITIMER_REAL)
    yield lambda: signal.alarm(20)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)  # that of pytest-timeout


@pytest.mark.parametrize("answer", HANGING)
def test_an_answer_that_would_hang_is_not_given_to_the_parser(answer):
    assert not is_text_bounded(canonical(answer))


def test_scorers_decide_such_an_answer_as_wrong(no_hang):
    for answer in HANGING:
        no_hang()
        text = rf"<think></think>\boxed{{{answer}}}"
        assert math_reward.compute_score(text, "5") == 0.0
        assert math_reward.compute_score(text, "5", format_score=0.1) == 0.1
        assert prime_math.compute_score(text, "5") == 0.0
        assert geo3k.accuracy_reward(text, "5") == 0.0


def test_a_truth_beyond_the_bounds_is_compared_as_text(no_hang):
    no_hang()
    assert is_equivalent("9^{9^{9^9}}", "$9^{9^{9^9}}$")
    assert not is_equivalent("9^{9^{9^8}}", "9^{9^{9^9}}")
    assert not is_equivalent("7", r"\int_0^1 x\,dx")


def test_hard_comparisons_end(no_hang):
    for answer, truth in [(answer, "y=2x+1") for answer in HARD]:
        no_hang()
        is_equivalent(answer, truth)


def test_what_people_write_is_compared_by_value():
    tables = (*EQUAL.values(), *UNEQUAL.values(), TOO_KIND)
    pairs = [pair for table in tables for both in table for pair in readings(*map(canonical, both))]
    assert [text for pair in pairs for text in pair if not is_text_bounded(text)] == []
    assert [text for text in LARGE if not is_text_bounded(text)] == []


@pytest.mark.parametrize(
    "text, is_bounded",
    [
        ("10^{999}", True),  # 1 · 999 digits
        ("10^{1001}", False),
        ("1000^{333}", True),  # 3 · 333
        ("1000^{334}", False),
        ("10^{20}10^{30}", True),  # 20 + 30
        ("10^{600}10^{600}", False),
        ("10^{600}+10^{600}", True),  # one digit more
        (r"\frac{10^{600}}{10^{600}}", False),  # its terms are as large before they cancel
        ("((10^{10})^{10})^{9}", True),  # 10 · 10 · 9
        (r"\sqrt{10^{999}}" * 3, False),  # 2997 digits
        (r"\sqrt{10^{590}}+" * 5, True),  # 590 digits · 10 powers and roots
        (r"\sqrt{10^{590}}+" * 6, False),
        ("10^{10^{2}}", True),
        ("10^{10^{4}}", False),
        (r"50000\ln 99", True),  # 50,000 · 2 digits of 99^50000
        (r"50001\ln 100", False),  # 50,001 · 2
    ],
)  # fmt: skip
def test_digits_of_a_power(text, is_bounded):
    assert is_text_bounded(text) is is_bounded


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_random_nested_answers_are_decided(seed, no_hang):
    for answer in random_answers(seed, 1000 if seed else 100):
        no_hang()
        assert is_equivalent(answer, "(7,8)") is False, answer


def test_unreadable_text_is_not_the_number_in_it():
    assert not any(is_equivalent(text, "5") for text in (r"\tan\{x,y\}\cdot 5", "{} 5", "x 5 & ! 5", "# 3 5"))


def test_steps_are_counted_and_a_trace_function_comes_back():
    def calls(count):
        for _ in range(count):
            len(random_text())
        return "done"

    def random_text():
        return "x"

    def tracer(*_):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert limited(lambda: calls(1000), otherwise="given up") == "done"
        assert limited(lambda: calls(MAX_STEPS), otherwise="given up") == "given up"
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_no_error_is_lost_in_a_generator_that_is_thrown_away(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def plain():
        return "done"

    def computation(calls_before):
        for _ in range(calls_before):
            plain()
        for _ in range(MAX_STEPS):  # more than enough: each generator is entered for a number, and for its end
            next(number for number in range(9))
        return plain()

    for calls_before in (0, 1):  # so that each of the two is the step too many
        assert limited(lambda calls=calls_before: computation(calls), otherwise="given up") == "given up"
    assert lost == []


def test_an_error_of_the_computation_is_raised():
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 / 0, otherwise=False)
