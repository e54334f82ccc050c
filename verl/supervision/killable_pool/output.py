"""Output of users' code in other processes: an excerpt goes to standard error, all to a file of limited size."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from verl.base.streams import printable

logger = logging.getLogger(__name__)

EXCERPT_BYTES = 2000  # of printed output shown in the log
FILE_BYTES = 8 * 2**20  # of printed output kept in a file: a function may print without end
_CUT = b"\n... more was printed; it is not kept.\n"


class PrintedOutput:
    """A pipe for the output of processes that do the same, read by the process that started them.

    Args:
        whose: the processes, in the warning that not all is shown.

    Attributes:
        writer: descriptor for the processes' standard output and error.
    """

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._path: Path | None = None
        self._kept_bytes = 0
        self._left_to_show = EXCERPT_BYTES

    def read(self) -> bool:
        """Take what is in the pipe, at most 1 MB; return whether there was any. Called when it can be read."""
        try:
            data = os.read(self.reader, 2**20)
        except BlockingIOError:
            return False
        self._keep(data)
        self._show(data)
        return bool(data)

    def close(self) -> None:
        """Take the rest and close the pipe; the file stays."""
        while self.read():
            pass
        os.close(self.reader)
        os.close(self.writer)

    def _keep(self, data: bytes) -> None:
        room = FILE_BYTES - self._kept_bytes
        if room <= 0:
            return
        self._kept_bytes += len(data)
        try:
            if self._path is None:
                descriptor, name = tempfile.mkstemp(prefix="verl_printed_", suffix=".txt")
                os.close(descriptor)
                self._path = Path(name)
            with self._path.open("ab") as file:
                file.write(data[:room] + (_CUT if len(data) > room else b""))
        except OSError as error:  # a full disk must not end the run
            logger.warning("what %s print cannot be kept in %s: %s", self.whose, self._path, error)
            self._kept_bytes = FILE_BYTES

    def _show(self, data: bytes) -> None:
        if not self._left_to_show:
            return
        end = len(data) if len(data) <= self._left_to_show else data.rfind(b"\n", 0, self._left_to_show) + 1
        self._left_to_show -= end
        with suppress(OSError):  # the reader of standard error is gone
            sys.stderr.write(printable(data[:end].decode(errors="replace"), keep="\n\t\r"))
            sys.stderr.flush()
        if end < len(data):
            self._left_to_show = 0
            logger.warning(
                "%s print more than %d bytes: the rest is in %s, up to %d MB.",
                self.whose,
                EXCERPT_BYTES,
                self._path,
                FILE_BYTES >> 20,
            )
