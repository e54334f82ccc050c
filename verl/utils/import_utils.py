"""Users' code by path: a file, ``pkg://dotted.module``, or ``dotted.module``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import ConfigError
from verl.utils import env
from verl.utils.registry import suggest

USER_MODULE = "verl_user_"
"""How the names of modules begin that were loaded from users' files."""


_DIGEST = "__verl_source_digest__"


def load_module(path: str, setting: str, digest: str | None = None) -> ModuleType:
    """Import a module by file path or by dotted name.

    A file is imported once per process: two settings that name the same file share its objects.

    Args:
        path: ``my_reward.py`` (``~`` and ``$VARIABLES`` are expanded), ``pkg://my.module`` or ``my.module``.
        setting: the configuration key that ``path`` comes from, for error messages.
        digest: :func:`source_digest` that the file must have.

    Raises:
        ConfigError: there is no such file or module, importing it fails, or the file is another by now.
    """
    if not path.endswith(".py"):
        return _import(path.removeprefix("pkg://"), path, setting)
    file = Path(os.path.expandvars(path)).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{setting}.path='{path}': there is no file {file}. Give the path of a Python file.")
    name = f"{USER_MODULE}{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest not in (None, found):
        raise ConfigError(
            f"{setting}.path='{path}' was changed while the run goes on: a process that starts now would use other "
            "code than those before it. Start the run again, or put the file back as it was."
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _DIGEST, found)
    sys.modules[name] = module  # before running it: dataclasses and pickle look their module up
    complete = False
    try:
        spec.loader.exec_module(module)
        complete = True
    finally:
        if not complete:
            del sys.modules[name]
    return module


def source_digest(module: ModuleType) -> str:
    """What tells the source of a module of :func:`load_module` from any other, as it was when it was imported."""
    return getattr(module, _DIGEST)


def _import(name: str, path: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"{setting}.path='{path}': there is no module '{error.name}'. "
            "Give a file that ends in .py, or a module that Python can import (see PYTHONPATH)."
        ) from error


def load_object(path: str, name: str, setting: str) -> Any:
    """The object ``name`` of the module at ``path``; arguments as in :func:`load_module`.

    Raises:
        ConfigError: as :func:`load_module`, or the module has no such name.
    """
    module = load_module(path, setting)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{setting}.name='{name}': {path} has no such name.{suggest(name, known)} It has: {', '.join(known)}."
        )
    return getattr(module, name)


def prepare_process() -> None:
    """What every process of a run does first: set verl's logging level, import the user's own modules.

    ``VERL_LOGGING_LEVEL`` and ``VERL_USE_EXTERNAL_MODULES``; what the modules register is then known here.
    """
    logging.getLogger("verl").setLevel(env.logging_level())
    for name in env.external_modules():
        importlib.import_module(name)
