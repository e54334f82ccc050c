"""Run ids in the lines of a ``file`` log, by which a resumed run removes its own later lines from a shared file."""

from __future__ import annotations

import json
import logging
import os
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

# Value of the key "run" in each line of a run that begins in this process or in a fork of it.
THIS_RUN = uuid.uuid4().hex[:16]


def cut_own_end(path: Path, run: str | None, after_step: int, keep_bytes: int = 0) -> None:
    """Remove an unfinished line and the lines of ``run`` for steps after ``after_step`` from the end of a log.

    Lines before one of another run are not removed, only reported in a warning. ``run=None`` removes lines without an
    id, which older versions wrote. The first ``keep_bytes`` of the file are kept in any case.
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
        record = json.loads(line)
        return record.get("run") == run and record["step"] > after_step
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
