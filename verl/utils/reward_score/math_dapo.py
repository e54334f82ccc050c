r"""Competition mathematics as DAPO scores it: ±1 for the ``Answer:`` line (https://arxiv.org/abs/2503.14476).

Answers are compared as text after the normalisation of Minerva (https://arxiv.org/abs/2206.14858,
appendix D.1). The data of these sources has integers as answers, for which that is exact; for
answers that want algebra take :mod:`verl.utils.reward_score.math_reward`.
"""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.math_reward import last_boxed

TAIL = 300
"""So many characters at the end of a response are read: the answer comes last, guesses on the way do not count."""
NO_ANSWER = "[INVALID]"
"""The ``pred`` of a response without an answer."""

ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

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
"""Units and signs that Minerva drops wherever they stand, in its order; spaces are gone by then."""

WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"frac([^{])(.)")
SHORT_ROOT = re.compile(r"sqrt([^{])")
THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def normalize(answer: str) -> str:
    r"""An answer in the one spelling in which Minerva compares answers.

    What stands before the last ``=`` is dropped, and so are articles, units and ``\text{}``; of text
    with ``$...$`` only the first formula stays; ``\frac12`` becomes ``\frac{1}{2}``; thousands' commas
    go (Minerva takes the comma out of ``1,2`` too).

    >>> normalize("x = 1{,}024 dollars"), normalize(r"the value is $\frac12$")
    ('1024', '\\frac{1}{2}')
    """
    text = answer.split("=")[-1]
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
    text = text.replace("$", "").strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


@register_scorer("math_dapo", "math", "math_dapo_reasoning", "aime*")
def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    r"""+1 if the last ``Answer:`` line within the last 300 characters is the truth, -1 otherwise.

    A response without an answer scores -1, as a wrong one does. Asterisks of Markdown around the answer
    and a full stop behind it are not part of it (in verl 0.8 they make a right answer wrong).

    Args:
        solution_str: the response.
        ground_truth: the answer, as text or number, with or without ``\boxed``.
        strict_box_verify: take the last ``\boxed{...}`` of those 300 characters instead of the ``Answer:``
            line, and compare it as it stands.

    Returns:
        ``score`` (1.0 or -1.0), ``acc`` (whether it is right), and ``pred``, the answer as it was
        compared (``[INVALID]`` for none).
    """
    tail, truth = solution_str[-TAIL:], str(ground_truth)
    truth = last_boxed(truth) or truth
    if strict_box_verify:
        found, truth = last_boxed(tail), truth.strip()
    else:
        lines = ANSWER.findall(tail)
        found, truth = normalize(_bare(lines[-1])) if lines else None, normalize(truth)
    is_right = found == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": NO_ANSWER if found is None else found}


def _bare(line: str) -> str:
    """The answer of a line without Markdown's asterisks and the full stop of a sentence."""
    return line.strip(" \t\r*").removesuffix(".").rstrip(" *")
