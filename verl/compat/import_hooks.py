"""Old import paths, which ``verl/compat/old_paths`` mirrors.

There is no ``verl/workers/roles.py``: ``import verl.workers.roles`` runs ``verl/compat/old_paths/workers/roles.py``, a
file of re-exports, as the module ``verl.workers.roles``. A path that this version lacks on purpose raises the sentence
of :mod:`verl.compat.absent_names`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar


class OldPaths:
    """Meta path finder of the old import paths.

    It stands first: a folder that a former version left behind (``__pycache__`` alone is enough) is a package to the
    finders after it. No module of ours has an old path, so it hides none (``tests/test_layers.py``).
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module ``verl.a.b`` as ``verl/compat/old_paths/a/b.py``."""
        if not name.startswith("verl."):
            return None
        folders = name.split(".")[1:-1]
        places = [os.path.join(place, "compat", "old_paths", *folders) for place in sys.modules["verl"].__path__]
        spec = PathFinder.find_spec(name, places, target)
        return spec if spec and spec.loader else None  # a folder without __init__.py only leads to the files in it


class AbsentPaths:
    """Meta path finder that stands last, and says of a path that none has found why it is absent."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError if the table has the path."""
        if name.startswith("verl.") and (sentence := _why_absent(name)):
            raise ModuleNotFoundError(sentence)  # without name=, or `from verl import tools` swallows the sentence


def install() -> None:
    """Let this process import old paths; ``verl/__init__.py`` calls it."""
    if OldPaths not in sys.meta_path:
        sys.meta_path.insert(0, OldPaths)
        sys.meta_path.append(AbsentPaths)


def old_names(module: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module that other versions of verl give more names.

    A name of :data:`verl.compat.reexports.REEXPORTS` is imported from its home when it is asked for; one of the table
    of absent names raises its sentence. That error is an ImportError, for ``from module import name`` replaces an
    AttributeError by a text of its own.
    """

    def imported(name: str) -> Any:
        return old_name(module, name)

    return imported


def old_name(module: str, name: str) -> Any:
    """Return what a module re-exported under ``name`` in another version of verl.

    Raises:
        ImportError: the name is absent on purpose; the message says what to use.
        AttributeError: no version has it.
    """
    if not name.startswith("__"):
        from verl.compat.reexports import home_of  # the tables are read only where they are needed

        if home := home_of(module, name):
            return load(*home)
        if sentence := _why_absent(f"{module}.{name}"):
            raise ImportError(sentence, name=module)
    raise AttributeError(f"module '{module}' has no attribute '{name}'")


def load(module: str, name: str) -> Any:
    """Return an object of a module, or the module below it of that name."""
    package = importlib.import_module(module)
    if not hasattr(package, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(package, name)


class AbsentAttributes:
    """Base class of classes some of whose public attributes are absent: reading one raises its sentence."""

    absent_at: ClassVar[str]
    """Address of the class in the table, :mod:`verl.compat.absent_names`."""

    if not TYPE_CHECKING:  # otherwise type checkers would accept misspelled names

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and (sentence := _why_absent(f"{type(self).absent_at}.{name}")):
                raise AttributeError(sentence)
            return object.__getattribute__(self, name)  # raises again, also what a property raised


def _why_absent(address: str) -> str | None:
    from verl.compat.absent_names import why_absent  # the table is read only where it is needed

    return why_absent(address)
