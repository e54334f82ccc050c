"""Import slow modules late, and faster."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from verl.base.plugins import import_module


@contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collection, and exclude what was made there from later collections.

    Modules live as long as the process. Each full collection would look at all of their objects again, which takes a
    sixth of the time in which PyTorch and Transformers are imported, and copies the memory that forks share.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def importing_meanwhile(modules: Sequence[str]) -> Iterator[None]:
    """Import modules in a thread while the block waits for other processes, and wait for the thread at its end.

    A module that cannot be imported raises its error where it is imported next.
    """

    def import_all() -> None:
        with suppress(Exception):
            for name in modules:
                importlib.import_module(name)

    thread = threading.Thread(target=import_all, name="verl-imports", daemon=True)
    with importing():
        thread.start()
        try:
            yield
        finally:
            thread.join()


def on_first_use(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module that offers names of slow modules without importing them (PEP 562).

    Args:
        module: ``__name__`` of the module.
        names: name → module that defines it. Import them under ``TYPE_CHECKING`` too, for type checkers and editors.
    """

    def imported(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return getattr(import_module(names[name]), name)

    return imported
