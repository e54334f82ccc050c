"""Whose the lines of a ``file`` log are: several runs may write into one, and each takes off its own only."""

from __future__ import annotations

import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

THIS_RUN = uuid.uuid4().hex[:16]
"""Under ``run`` in each line of a run that begins in this process, or in one that is forked from it."""


def cut_own_end(path: Path, run: str | None, after_step: int, keep_bytes: int = 0) -> None:
    """Take off the end of a log what ``run`` wrote of steps after ``after_step``, and a line that is not finished.

    Lines that another run wrote behind them hold them where they are; a warning says so.

    Args:
        path: of the log.
        run: id of the run; None takes lines without an id, as they were written before there were any.
        after_step: these steps will be logged again.
        keep_bytes: how much of the file stays whatever it holds.
    """
    content = path.read_bytes()
    head, lines = content[:keep_bytes], content[keep_bytes:].splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    again = [_is_of(line, run, after_step) for line in lines]
    while again and again[-1]:
        again.pop()
    os.truncate(path, len(head) + sum(map(len, lines[: len(again)])))
    if any(again):
        logger.warning(
            "%s: another run has written behind this one, so %d lines of steps after %d stay and come again below.",
            path,
            sum(again),
            after_step,
        )


def _is_of(line: bytes, run: str | None, after_step: int) -> bool:
    try:
        record: Any = json.loads(line)
        return record.get("run") == run and record["step"] > after_step
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
