"""Penalty for saying the same thing again and again. A pure function for rewards of your own."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from verl.errors import ConfigError

_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts that put no space between words."""
_UNIT = re.compile(rf"[{_SPACELESS}]|(?:(?![{_SPACELESS}])\w)+|[^\w\s]")


def repetition_penalty(text: str | Sequence[Hashable], ngram_size: int = 4, max_penalty: float = 1.0) -> float:
    """Minus the share of n-grams that have been seen before in the same text.

        penalty = -max_penalty · (1 - distinct n-grams / n-grams)

    After the n-gram repetition penalty of https://arxiv.org/abs/2502.03373, summed over
    the response and made independent of its length.

    Args:
        text: the response, or its token ids. Text is cut into words and signs; where a script has no
            spaces, into characters. So it does not depend on the language.
        ngram_size: n.
        max_penalty: the limit for a text that says one thing for ever, as a positive number.

    Returns:
        a number in (``-max_penalty``, 0]; 0 for a text of fewer than two n-grams.

    Raises:
        ConfigError: ``ngram_size`` is below 1, or ``max_penalty`` is negative.

    >>> repetition_penalty("yes yes yes yes yes", ngram_size=2)  # four n-grams, one distinct
    -0.75
    """
    if ngram_size < 1 or max_penalty < 0:
        raise ConfigError(
            f"repetition_penalty: ngram_size={ngram_size} must be at least 1 and max_penalty={max_penalty} at least 0."
        )
    units = _UNIT.findall(text.lower()) if isinstance(text, str) else text
    count = len(units) - ngram_size + 1
    if count < 2:
        return 0.0
    distinct = {tuple(units[start : start + ngram_size]) for start in range(count)}
    return -max_penalty * (count - len(distinct)) / count
