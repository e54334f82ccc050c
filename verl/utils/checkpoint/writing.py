"""One rank's part of a save: written at once, or by a thread while the next step runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from verl.utils.checkpoint.files import FileEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """How one rank's part of a save went."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    """What was written, by the path below the folder."""
    problem: str | None = None
    """Why it could not be written."""


class Writing:
    """A part of a save that is being written.

    Args:
        write: writes into a folder that exists, and says what.
        folder: made if need be.
        background: return before it is written.
    """

    def __init__(self, write: Callable[[Path], dict[str, FileEntry]], folder: Path, background: bool) -> None:
        self._report: SaveReport | None = None
        # A daemon: what is half written when the process ends is not waited for, because nobody would commit it.
        self._thread = threading.Thread(target=self._run, args=(write, folder), name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run(write, folder)

    def _run(self, write: Callable[[Path], dict[str, FileEntry]], folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._report = SaveReport(write(folder))
        except Exception as error:
            logger.warning("could not write to %s", folder, exc_info=error)
            self._report = SaveReport(problem=f"{type(error).__name__}: {error}")

    def report(self, wait: bool) -> SaveReport | None:
        """How it went; None while it is being written, unless ``wait``."""
        if wait and self._report is None:
            self._thread.join()
        return self._report
