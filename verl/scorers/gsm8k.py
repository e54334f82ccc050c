"""Scorer of GSM8K (arXiv:2110.14168): the number after ``####``."""

from __future__ import annotations

import re
from typing import Literal

from verl.errors import ConfigError, RewardError
from verl.scorers.answer_text import (
    CURRENCY,
    UNSIGNED,
    WrittenNumber,
    plain_answer,
    read_decimal,
    with_latex_signs,
    with_one_spelling,
)
from verl.scorers.math_equality import last_boxed
from verl.scorers.registry import register_scorer, text_of_truth

MARK = "####"
LINE_LENGTH = 300
"""Characters after a mark, or up to the last digit, that are read."""
OPENING = re.compile(
    r"(?:[\s*_`\"({]|\$|\\\(|\\\[|\\[,;: ]|\\(?:boxed|fbox|text|textbf|textrm|mathbf|mathrm|displaystyle)(?![A-Za-z]))*"
)
"""Wrappers before a number: Markdown, delimiters of formulas, a box."""
STARTS = re.compile(rf"\s*[+-]?\s*{CURRENCY}?\s*[+-]?\s*(?:\d|\.\d|\\frac|\\sqrt)")
SIGNED_NUMBER = re.compile(rf"\s*([+-]?)\s*{CURRENCY}?\s*([+-]?)\s*({UNSIGNED})")
CONTINUES = re.compile(
    r"[.,]?\d|[eE][+-]?\d|[kK](?![A-Za-z])|\\(?:frac|sqrt|pi)(?![A-Za-z])"
    r"|(?:\\[,;: ]|[\s*_`\")}$~]|\\(?:text|mathrm)\s*\{)*"
    r"(?:[:/^](?!\s*\{?\s*\\circ)\s*[({]?\s*-?\d|\s\d|[+*x=\-\u2010-\u2015]\s*[({]?\s*\d|\\(?:times|cdot|div)(?![A-Za-z])"
    r"|(?:(?:hundred|thousand|million|billion|trillion|dozen)s?|percent of)\b|(?:or|and|to)\s+-?\$?\d)"
)
"""Continuations that make a number part of something else: ``3/4``, ``1e3``, ``5:30``, ``5 million``, ``5 or 6``."""
RUN = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}.])-)?{CURRENCY}?-?(?:(?<!\.)\.)?\d(?:[\d.,:/^]|[eE*x+-]{{1,2}}(?=\d))*", re.ASCII
)
"""A number with all that hangs together with it."""

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    r"""Return the number that a response gives as its answer, without separators and currency; None if none.

    Method ``strict`` takes the number after the last ``####``, with or without wrappers (``\$5``, ``**5**``,
    ``\boxed{5}``); ``flexible`` the last number of the text. Only whole numbers and decimals are numbers here: ``3/4``,
    ``1e3`` and ``5:30`` are none, and not the number that they begin with.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method='{method}' is unknown; there are strict and flexible.")
    return _marked(solution_str) if method == "strict" else _last(solution_str)


def _marked(text: str) -> str | None:
    """Number after the last mark that anything like a number follows."""
    end = len(text)
    while (start := text.rfind(MARK, 0, end)) >= 0:
        after = text[start + len(MARK) : min(end, start + LINE_LENGTH)].lstrip("# \t\r\n")
        line = with_one_spelling(with_latex_signs(after.split("\n", 1)[0]))
        answer = line[OPENING.match(line).end() :]  # type: ignore[union-attr]  # it matches the empty text too
        if STARTS.match(answer):
            return _at_start(answer)
        end = start
    return None


def _at_start(text: str) -> str | None:
    match = SIGNED_NUMBER.match(text)
    if match is None or (match[1] and match[2]) or CONTINUES.match(text, match.end()):
        return None
    sign = "-" if "-" in (match[1], match[2]) else ""
    return sign + re.sub(r"[^0-9.]", "", match[3]).removesuffix(".")


def _last(text: str) -> str | None:
    last = next((index for index in range(len(text) - 1, -1, -1) if text[index].isdecimal()), None)
    if last is None:
        return None
    end = with_one_spelling(with_latex_signs(text[max(0, last - LINE_LENGTH) : last + LINE_LENGTH]))
    starts = [run.start() for run in RUN.finditer(end)]
    return _at_start(end[starts[-1] :]) if starts else None


def read_truth(ground_truth: object) -> WrittenNumber:
    r"""Read the number of a ground truth: ``5``, ``5.0``, ``\boxed{5}``, or the column ``answer`` with ``#### 5``.

    Raises:
        RewardError: it has no number.
    """
    text = text_of_truth(ground_truth)
    answer = _marked(text) if MARK in text else _at_start(plain_answer(last_boxed(text) or text))
    value = read_decimal(answer or "")
    if value is None:
        raise RewardError(
            f"gsm8k: ground_truth is {ground_truth!r:.120}; expected a whole number or a decimal, such as 18, '1,000' "
            "or '2.5', alone, in \\boxed{...} or after '####'. Correct reward_model.ground_truth of this row, or its "
            "data source."
        )
    return value


@register_scorer("openai/gsm8k", "gsm8k", truth=read_truth)
def compute_score(
    solution_str: str, ground_truth: object, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` for the right number, ``format_score`` for another one, 0 for none.

    Numbers are compared by value: 1,000, 1000 and 1000.00 are equal. ``method``: see :func:`extract_solution`.

    Raises:
        RewardError: the ground truth has no number.
    """
    truth = read_truth(ground_truth)
    answer = read_decimal(extract_solution(solution_str, method) or "")
    if answer is None:
        return 0.0
    return score if answer.value == truth.value else format_score
