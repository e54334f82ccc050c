r"""Scorer of DAPO for competition mathematics: ±1 for the ``Answer:`` line (https://arxiv.org/abs/2503.14476).

Answers are compared as numbers (073 is 73), or else as text after the normalisation of Minerva
(https://arxiv.org/abs/2206.14858, appendix D.1); for answers that need algebra use
:mod:`verl.scorers.math_reward`.
"""

from __future__ import annotations

import re

from verl.errors import RewardError
from verl.scorers.answer_text import plain_answer, read_number
from verl.scorers.math_equality import have_different_units, last_boxed, text_of_answer
from verl.scorers.math_equality import last_boxed_only_string as last_boxed_only_string
from verl.scorers.math_equality import remove_boxed as remove_boxed
from verl.scorers.registry import register_scorer

TAIL = 300
"""Number of last characters of a response that are read, so that only the final answer counts."""
NO_ANSWER = "[INVALID]"
"""The ``pred`` of a response without an answer."""

ANSWER = re.compile(r"answer[\s*_]*[:\uff1a][\s*]*(\\\[.*?\\\]|\$\$.*?\$\$|[^\n]+)", re.IGNORECASE | re.DOTALL)
"""The line, or the displayed formula that begins there."""
INTEGER = re.compile(r"[+-]?\d+")

SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
"""Units and signs that Minerva removes everywhere, in its order, after all spaces have been removed."""

WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"frac([^{])(.)")
SHORT_ROOT = re.compile(r"sqrt([^{])")
SHORT_POWER = re.compile(r"([_^])\{(\w)\}")
THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
SEPARATORS = re.compile(r"(?<=[0-9])(?: +(?=[0-9])|(?:,|\\[,;:! ]|~)(?=[0-9]{3}(?![0-9])))")
DIGITS = re.compile(r"[0-9]+")


def normalize_final_answer(final_answer: str) -> str:
    r"""Normalize an answer as Minerva does before it compares.

    Removed are the text before the last ``=``, articles, units and ``\text{}``, all but the first formula of a text
    with ``$...$``, and thousands separators (Minerva also removes the comma of ``1,2``). ``\frac12`` becomes
    ``\frac{1}{2}``.

    >>> normalize_final_answer("x = 1{,}024 dollars"), normalize_final_answer(r"the value is $\frac12$")
    ('1024', '\\frac{1}{2}')
    """
    text = final_answer.split("=")[-1]
    for old, new in SUBSTITUTIONS:
        text = text.replace(old, new)
    for words in REMOVED:
        text = text.replace(words, "")
    if text.count("$") > 1:
        text = "$" + text.split("$", 2)[1] + "$"
    text = WRAPPED.sub(r"\1", text)
    if "\\boxed{" in text:
        text = last_boxed(text) or text
    text = SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = SHORT_ROOT.sub(r"sqrt{\1}", text)
    text = SHORT_POWER.sub(r"\1\2", text)
    text = text.replace("$", "").strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def read_truth(ground_truth: object) -> str:
    r"""Return the answer of a ground truth, without ``\boxed``.

    Raises:
        RewardError: nothing is left of it to compare with.
    """
    truth = text_of_answer(ground_truth)
    if not normalize_final_answer(plain_answer(truth)):
        raise RewardError(
            f"math_dapo: ground_truth is {ground_truth!r:.120}, of which normalisation leaves nothing; expected an "
            "answer such as 73, '073' or '\\frac{1}{2}'. Correct reward_model.ground_truth of this row, or its data "
            "source."
        )
    return truth


@register_scorer("math_dapo", "math", "math_dapo_reasoning", "aime*", truth=read_truth)
def compute_score(solution_str: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, object]:
    r"""Score +1 if the last ``Answer:`` line within the last 300 characters has the right answer, -1 otherwise.

    Signs and wrappers around the answer are read as in :mod:`.answer_text`, and numbers are compared by value (in
    verl 0.8 both make a right answer wrong).

    Args:
        solution_str: the response.
        ground_truth: the answer, as text or number, with or without ``\boxed``.
        strict_box_verify: take the last ``\boxed{...}`` of those 300 characters instead of the ``Answer:``
            line, and compare it without normalisation; only whole numbers are compared by value.

    Returns:
        ``score`` (1.0 or -1.0), ``acc`` (whether it is right), and ``pred``, the answer as it was
        compared (``[INVALID]`` for none).

    Raises:
        RewardError: the ground truth has nothing to compare with.
    """
    tail, truth = solution_str[-TAIL:], read_truth(ground_truth)
    if strict_box_verify:
        answer = last_boxed(tail)
        is_right = answer is not None and (answer == truth or _are_same_whole_numbers(answer, truth))
    else:
        lines = ANSWER.findall(tail)
        written = plain_answer(lines[-1].strip(" \t\r*.,;:")) if lines else ""
        answer = normalize_final_answer(written) if lines else None
        is_right = answer is not None and _is_same(written, plain_answer(truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": NO_ANSWER if answer is None else answer}


def _is_same(*texts: str) -> bool:
    """Return whether two answers are the same number, or the same text after normalisation."""
    normalized = [normalize_final_answer(text) for text in texts]
    # Normalisation removes spaces: 2 1/2 would be 21/2.
    left, right = (read_number(text) or read_number(short) for text, short in zip(texts, normalized, strict=True))
    # It also removes units, and all but the last side of an equation.
    sides = [parsed.value for side in texts[0].split("=") if (parsed := read_number(side))]
    if have_different_units(*texts) or len(set(sides)) > 1:
        return False
    if read_number(texts[0]) is None and _joins_numbers(texts[0], normalized[0]):
        return False
    return normalized[0] == normalized[1] if left is None or right is None else left.value == right.value


def _joins_numbers(text: str, normalized: str) -> bool:
    """Return whether the removal of words and signs has made one number of two, as 56 of ``5 points 6``."""
    written = DIGITS.findall(SEPARATORS.sub("", text))
    return any(all(digits not in each for each in written) for digits in DIGITS.findall(normalized))


def _are_same_whole_numbers(*texts: str) -> bool:
    left, right = map(plain_answer, texts)
    return bool(INTEGER.fullmatch(left) and INTEGER.fullmatch(right)) and int(left) == int(right)
