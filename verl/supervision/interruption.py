"""Ctrl-C (SIGINT) in a command: a sentence and exit code 130 in place of a traceback; the second one ends it at once.

::

    on_import("verl.trainer")     while a command imports, and after its end
    with interruptible():         while it runs
        ...
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from verl.supervision.termination import not_ignored, unwrapped

EXIT_CODE = 128 + signal.SIGINT  # as shells report a program ended by a signal

# A later SIGINT within this time is taken for the same one: a launcher such as `timeout` signals the process group and
# passes its own signal on.
_SAME_S = 0.5


def end_at_once() -> NoReturn:
    """End this program and its descendants, from any thread, because a second SIGINT came."""
    _end("Interrupted again: ended at once.")


class Interrupts:
    """Count SIGINTs; the second calls ``at_second``, which by default ends this program; later ones do nothing."""

    def __init__(self, at_second: Callable[[], None] = end_at_once) -> None:
        self._at_second = at_second
        self._noted_at: float | None = None

    def note(self) -> bool:
        """Note a SIGINT; return whether it is the first."""
        if self._noted_at is None:
            self._noted_at = time.monotonic()
            return True
        if time.monotonic() > self._noted_at + _SAME_S:
            self._noted_at = math.inf
            self._at_second()
        return False

    def forget(self) -> None:
        """Take the next SIGINT for the first."""
        self._noted_at = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the KeyboardInterrupt of the first SIGINT into a sentence, with its notes, and ``SystemExit(130)``.

    Outside of the main thread, and where SIGINT is ignored (``nohup``), no handler is installed.
    """
    interrupts = Interrupts()

    def on_sigint(signum: int, frame: FrameType | None) -> None:
        if interrupts.note():
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    is_installed = is_main and before is not signal.SIG_IGN
    if is_installed:
        signal.signal(signal.SIGINT, on_sigint)
    try:
        with unwrapped(), not_ignored(KeyboardInterrupt, signal.SIGINT, interrupts.forget):
            yield
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"\n{' '.join(['Interrupted.', *getattr(interrupt, '__notes__', ())])}\n")
        raise SystemExit(EXIT_CODE) from None
    finally:
        if is_installed:
            signal.signal(signal.SIGINT, before)


def on_import(package: str) -> None:
    """If ``python -m`` runs a module of ``package``, let SIGINT end this process at once, without a traceback.

    Called when the package is imported, before the imports of the command itself, which take seconds.
    """
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    is_command = module == package or module.startswith(f"{package}.")
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda signum, frame: _end("Interrupted."))


def _end(text: str) -> NoReturn:
    from verl.supervision.processes import end_program  # imports psutil, which a process that starts can do without

    end_program(text, EXIT_CODE)
