"""Import hooks by which this version of verl has the import paths and names of other versions.

- **Paths.** There is no ``verl/workers/roles.py``: ``import verl.workers.roles`` runs
  ``verl/compat/old_paths/workers/roles.py``, a file of re-exports, as the module ``verl.workers.roles``.
- **Moved packages and modules.** There is no folder ``verl/utils/dataset``: ``verl.utils.dataset.rl_dataset`` is the
  module ``verl.datasets.rl_dataset`` itself under a second name (:data:`MOVED`). So what a program sets in the one is
  set in the other.
- **Names.** A module that lacks a name looks it up in :mod:`verl.compat.reexports`. So nothing is imported before it
  is asked for, and modules of verl know nothing of names that other versions show in them.
- **Absent paths, names and attributes** raise the sentence of :mod:`verl.compat.absent_names`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MOVED: dict[str, str] = {
    "verl.environments.gymnasium_environment": "verl.plugins.gymnasium.environment",
    "verl.environments.verifiers_environment": "verl.plugins.verifiers.environment",
    "verl.tools.python_tool": "verl.plugins.sandbox.python_tool",
    "verl.tools.sandbox_fusion_tools": "verl.plugins.sandbox.sandbox_fusion_tools",
    "verl.utils.dataset": "verl.datasets",
    "verl.utils.reward_score.prime_code": "verl.plugins.sandbox.prime_code",
    "verl.utils.reward_score.sandbox_fusion": "verl.plugins.sandbox.sandbox_fusion",
    "verl.utils.reward_score": "verl.scorers",
    "verl.utils.tracking": "verl.tracking",
}
"""Public name of a package or module → what it is here. The tables of other names go by the public name."""

CLASSES = {
    "verl.compat.own_fit.ray_trainer": {"RayPPOTrainer": "verl.trainer.ppo.ray_trainer.RayPPOTrainer"},
    "verl.compat.toolkit.rollouts": {"RolloutSkip": "verl.utils.rollout_skip.RolloutSkip"},
    "verl.datasets.rl_dataset": {"RLHFDataset": "verl.utils.dataset.rl_dataset.RLHFDataset"},
    "verl.workers.fsdp_workers": {"ActorRolloutRefWorker": "verl.workers.fsdp_workers.ActorRolloutRefWorker"},
    "verl.workers.rollout.base": {"BaseRollout": "verl.workers.rollout.base.BaseRollout"},
    "verl.workers.training_workers": {"TrainingWorker": "verl.workers.engine_workers.TrainingWorker"},
}
"""Module → class → its address in the table of absent names, for classes that lack attributes of other versions."""


class PublicPaths:
    """Meta path finder of the modules of verl, which finds old import paths too and offers the names of both.

    It stands first: a folder that a former version left behind (``__pycache__`` alone is enough) is a package to the
    finders after it. No module of verl has an old path, so that this hides none (``tests/test_layers.py``).
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ``verl.a.b`` as ``verl/compat/old_paths/a/b.py``, in a moved package, or as ``verl/a/b.py``."""
        if not name.startswith("verl."):
            return None
        folders = name.split(".")[1:-1]
        mirrors = [os.path.join(root, "compat", "old_paths", *folders) for root in sys.modules["verl"].__path__]
        spec = PathFinder.find_spec(name, mirrors, target)
        if (spec is None or spec.loader is None) and (home := _replace_prefix(name, MOVED)):
            moved = importlib.util.find_spec(home)
            return moved and ModuleSpec(name, LoaderOfMovedModules(home), origin=moved.origin)
        if spec is None or spec.loader is None:  # a folder without __init__.py only leads to the files in it
            spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        folders_of_mirror = (os.path.join(mirror, name.rpartition(".")[2]) for mirror in mirrors)
        if spec.submodule_search_locations is None and any(map(os.path.isdir, folders_of_mirror)):
            spec.submodule_search_locations = []  # a module with old paths below it must be a package to Python
        spec.loader = LoaderOfPublicNames(spec.loader)
        return spec


class LoaderOfPublicNames(Loader):
    """Loads a module as another loader does, and offers the names of other versions in it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:  # what else a loader of files or of an archive can: source, data
        if name == "loader":  # copy looks before it is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See :meth:`importlib.abc.Loader.create_module`."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See :meth:`importlib.abc.Loader.exec_module`."""
        self.loader.exec_module(module)
        _offer_names(module)


class LoaderOfMovedModules(Loader):
    """Gives a module a second name."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> None:
        """See :meth:`importlib.abc.Loader.create_module`."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the home in the place of the new one; ``import`` takes what stands there after this."""
        sys.modules[module.__name__] = importlib.import_module(self.home)


class AbsentPaths:
    """Meta path finder that stands last, and says of a path that none has found why it is absent."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError if the table has the path."""
        if name.startswith("verl.") and (sentence := _why_absent(name)):
            raise ModuleNotFoundError(sentence)  # without name=, or `from verl import tools` swallows the sentence


def install() -> None:
    """Let this process import old paths and names; ``verl/__init__.py`` calls it at its end."""
    if PublicPaths in sys.meta_path:
        return
    for name, module in list(sys.modules.items()):
        if name == "verl" or name.startswith("verl."):
            _offer_names(module)
    sys.meta_path.insert(0, PublicPaths)
    sys.meta_path.append(AbsentPaths)


def _offer_names(module: ModuleType) -> None:
    """Give a module a ``__getattr__`` that falls back to the names of other versions (PEP 562)."""
    module_getattr: Callable[[str], object] | None = vars(module).get("__getattr__")
    address = _replace_prefix(module.__name__, {home: public for public, home in MOVED.items()}) or module.__name__

    def look_up(name: str) -> object:
        if module_getattr is None:
            return _other_name(address, name)
        try:
            return module_getattr(name)
        except AttributeError:
            return _other_name(address, name)

    vars(module)["__getattr__"] = look_up
    for name, public in CLASSES.get(module.__name__, {}).items():
        getattr(module, name).__getattr__ = _refusal_of_absent_attributes(public)


def _replace_prefix(name: str, packages: Mapping[str, str]) -> str | None:
    """Return the name of a module below one of the packages with the other name of the package; None for the rest."""
    for package, other in packages.items():
        if name == package or name.startswith(f"{package}."):
            return other + name.removeprefix(package)
    return None


def _other_name(module: str, name: str) -> object:
    """Return what a module shows under ``name`` in another version of verl.

    Raises:
        ImportError: the name is absent on purpose; the message says what to use. It is no AttributeError, because
            ``from module import name`` replaces the text of one.
        AttributeError: no version has it.
    """
    if not name.startswith("__"):
        from verl.compat.reexports import home_of  # the tables are read only where they are needed

        if home := home_of(module, name):
            return load(*home)
        if sentence := _why_absent(f"{module}.{name}"):
            raise ImportError(sentence, name=module)
    raise AttributeError(f"module '{module}' has no attribute '{name}'")


def load(module: str, name: str) -> object:
    """Return an object of a module, or the module below it of that name."""
    package = importlib.import_module(module)
    if not hasattr(package, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(package, name)


def _refusal_of_absent_attributes(address: str) -> Callable[[object, str], object]:
    """Make the ``__getattr__`` of a class by which reading an absent attribute raises its sentence."""

    def refuse(self: object, name: str) -> object:
        if not name.startswith("__") and (sentence := _why_absent(f"{address}.{name}")):
            raise AttributeError(sentence)
        return object.__getattribute__(self, name)  # raises again, also what a property raised

    return refuse


def _why_absent(address: str) -> str | None:
    from verl.compat.absent_names import why_absent  # the table is read only where it is needed

    return why_absent(address)
