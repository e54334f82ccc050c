"""Files of samples for people to read; a failed write does not stop the run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class RecordFolder:
    """A folder of files ``{step}.jsonl`` with one line per sample.

    Args:
        folder: created at the first write; None writes nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.failed = 0
        """Number of failed writes."""

    def write(self, step: int, records: Iterable[Mapping[str, Any]], append: bool = False) -> None:
        """Write the records of a step, or append them to the step's file.

        If the write fails, all of these records are left out, so that no line is cut; the first failure logs a warning.
        """
        if self.folder is None:
            return
        path = self.folder / f"{step}.jsonl"
        lines = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(path, lines.encode(), append)
        except OSError as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning(
                    "samples cannot be written to %s (%s); training goes on without them, and recovery/failed_dumps "
                    "counts. Free space, or set trainer.rollout_data_dir and trainer.validation_data_dir.",
                    path,
                    error,
                )


def _write(path: Path, data: bytes, append: bool) -> None:
    before = path.stat().st_size if append and path.exists() else 0
    with path.open("ab" if append else "wb", buffering=0) as file:
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:
            os.truncate(path, before)
            raise
