"""Errors that come again and again: the traceback once, then a line for each."""

from __future__ import annotations

_MARK = "Traceback (most recent call last):\n"
_shown: set[str] = set()


def without_repeated_traceback(text: str) -> str:
    """Return a text as it is, but with the last line of its traceback alone if this process had the same one before.

    Tracebacks are the same if they have the same frames and the same type of error.
    """
    before, _, after = text.rpartition(_MARK)
    if not after or _MARK not in text:
        return text
    lines = after.splitlines()
    end = next((index for index, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    error, rest = lines[end], lines[end + 1 :]
    place = "\n".join([*lines[:end], error.partition(":")[0]])
    if place not in _shown:
        _shown.add(place)
        return text
    head = before.partition(_MARK)[0].rstrip()
    return "\n".join([f"{head} {error} (its traceback is above)".lstrip(), *rest])
