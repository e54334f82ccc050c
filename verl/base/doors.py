"""Old import paths, which ``verl/compat`` mirrors.

There is no ``verl/workers/roles.py``: ``import verl.workers.roles`` runs ``verl/compat/workers/roles.py``, a file of
re-exports, as the module ``verl.workers.roles``. A path that this version lacks on purpose raises the sentence of
:mod:`verl.base.absent`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn


class OldPaths:
    """Meta path finder of the old import paths.

    It stands first: a folder that a former version left behind (``__pycache__`` alone is enough) is a package to the
    finders after it. No module of ours has an old path, so it hides none (``tests/test_layers.py``).
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module ``verl.a.b`` as ``verl/compat/a/b.py``."""
        if not name.startswith("verl."):
            return None
        folders = name.split(".")[1:-1]
        places = [os.path.join(place, "compat", *folders) for place in sys.modules["verl"].__path__]
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


def absent_names(module: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of a module some of whose old names are absent: it raises their sentences.

    The error is an ImportError, for ``from module import name`` replaces an AttributeError by a text of its own.
    """

    def missing(name: str) -> NoReturn:
        if not name.startswith("__") and (sentence := _why_absent(f"{module}.{name}")):
            raise ImportError(sentence, name=module)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing


class AbsentAttributes:
    """Base class of classes some of whose public attributes are absent: reading one raises its sentence."""

    absent_at: ClassVar[str]
    """Address of the class in the table, :mod:`verl.base.absent`."""

    if not TYPE_CHECKING:  # otherwise type checkers would accept misspelled names

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and (sentence := _why_absent(f"{type(self).absent_at}.{name}")):
                raise AttributeError(sentence)
            return object.__getattribute__(self, name)  # raises again, also what a property raised


def _why_absent(address: str) -> str | None:
    from verl.base.absent import why_absent  # the table is read only where it is needed

    return why_absent(address)
