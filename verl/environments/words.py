"""Actions in the text of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable


def last_word(text: str, words: Iterable[str]) -> str | None:
    """Return the one of some words, or groups of words, that a text names last, in capitals or not; None for none.

    >>> last_word("Not left. I go UP.", ["left", "up"])
    'up'
    """
    by_lower = {word.lower(): word for word in words}
    # The longest at a place: "turn left" is not "left".
    longest_first = sorted(by_lower, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    found = re.findall(pattern, text.lower())
    return by_lower[found[-1]] if found else None
