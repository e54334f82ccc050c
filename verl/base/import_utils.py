"""Import users' code by path: a file, ``pkg://dotted.module``, or ``dotted.module``."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl.base import env
from verl.base.plugins import import_module
from verl.base.registry import suggest
from verl.errors import ConfigError, MissingFileError, MissingNameError, UserCodeError, VerlError

T = TypeVar("T")

USER_MODULE = "verl_user_"  # prefix of the module names of users' files
_DIGEST = "__verl_source_digest__"
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(Path(__file__).parents[1]))
"""Folders of code that is not the users': Python, installed packages, verl."""


def load_module(path: str, key: str, digest: str | None = None) -> ModuleType:
    """Import a module by file path or by dotted name.

    A file is imported once per process: two settings that name the same file share its objects.

    Args:
        path: ``my_reward.py`` (``~`` and ``$VARIABLES`` are expanded), ``pkg://my.module`` or ``my.module``.
        key: the configuration key of ``path``, for error messages.
        digest: the :func:`source_digest` that the file must have.

    Raises:
        ConfigError: there is no such file or module, or the file has another digest.
    """
    if not path.endswith(".py"):
        return _import(path.removeprefix("pkg://"), path, key)
    file = Path(os.path.expandvars(path)).expanduser().resolve()
    if not file.is_file():
        raise MissingFileError(f"{key}='{path}': there is no file {file}. Give the path of a Python file.")
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest not in (None, checksum):
        raise ConfigError(
            f"{key}='{path}' was changed during the run: a process that starts now would use other code "
            "than the earlier ones. Start the run again, or restore the file."
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _DIGEST, checksum)
    sys.modules[name] = module  # before its execution: dataclasses and pickle look up their module there
    complete = False
    try:
        with user_code(f"{key}='{path}' cannot be imported"):
            spec.loader.exec_module(module)
        complete = True
    finally:
        if not complete:
            del sys.modules[name]
    return module


def _module_name(file: Path) -> str:
    return f"{USER_MODULE}{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"


def unload_module(file: Path) -> None:
    """Let the next :func:`load_module` of a file import it again, as it was written anew."""
    sys.modules.pop(_module_name(file.resolve()), None)
    # Python takes compiled code for current whose source has the same size and the same second of its last change.
    Path(importlib.util.cache_from_source(str(file.resolve()))).unlink(missing_ok=True)


@contextmanager
def user_code(problem: str) -> Iterator[None]:
    """Turn an error of users' code in the block into a ConfigError with their own line in place of a traceback.

    Errors of verl pass unchanged.
    """
    try:
        yield
    except VerlError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script without `if __name__ == "__main__"`
        message = error.msg if isinstance(error, SyntaxError) else str(error)  # str() of it repeats file and line
        raise UserCodeError(f"{problem}:\n  {_user_line(error)}\n  {type(error).__name__}: {message}") from error


def users_class(cls: Callable[..., T], setting: str) -> Callable[..., T]:
    """Return a function that makes an object of a users' class; errors as in :func:`user_code`."""

    def create(*args: object, **kwargs: object) -> T:
        with user_code(f"{setting}: {getattr(cls, '__name__', cls)} cannot be made"):
            return cls(*args, **kwargs)

    return create


def _user_line(error: BaseException) -> str:
    """File, line number and text of the users' innermost line in a traceback; of the innermost line if none is."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(("<frozen ", *_LIBRARIES))]
    frame = (user_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def source_digest(module: ModuleType) -> str:
    """Return the SHA-256 digest of the source of a module that :func:`load_module` loaded from a file."""
    return getattr(module, _DIGEST)


def is_about(error: ModuleNotFoundError, module: str) -> bool:
    """Return whether ``module`` itself is missing, or a package that it is in, and not something that it imports."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def _import(name: str, path: str, key: str) -> ModuleType:
    with user_code(f"{key}='{path}' cannot be imported"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if not is_about(error, name):
                raise
            raise ConfigError(
                f"{key}='{path}': there is no module '{error.name}'. "
                "Give a file that ends in .py, or a module that Python can import (see PYTHONPATH)."
            ) from error


def load_object(path: str, name: str, key: str, name_key: str | None = None) -> Any:
    """Return an object of the module at ``path``; arguments as in :func:`load_module`, and the key of ``name``."""
    module = load_module(path, key)
    if not hasattr(module, name):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise MissingNameError(
            f"{name_key or key}='{name}': {path} has no such name.{suggest(name, names)} It has: {', '.join(names)}."
        )
    return getattr(module, name)


def prepare_process() -> None:
    """Read the environment variables that hold for a process: logging, and modules and plugins of the user's.

    Every process of a run calls this first, so that what the user's modules register is available in it. A plugin is
    an entry point of the group ``verl.plugins``; it is loaded and, if it can be called, called.

    Raises:
        ConfigError: a variable cannot be used, or a module or plugin cannot be imported.
    """
    logging.getLogger("verl").setLevel(env.logging_level())
    # A call inside torchdata that newer versions of PyTorch deprecate.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning, r"torchdata\.")
    env.refuse_unusable()
    plugins = env.external_plugins()
    import importlib.metadata  # here, because every command imports this module

    # Reading what all installed packages offer takes a tenth of a second, and few runs have a plugin.
    offered = importlib.metadata.entry_points(group="verl.plugins") if plugins else ()
    installed = {plugin.name: plugin for plugin in offered}
    for name in plugins:
        if name not in installed:
            names = ", ".join(sorted(installed)) or "there are none"
            raise ConfigError(
                f"VERL_USE_EXTERNAL_PLUGINS names '{name}', and no installed package has such an entry point of "
                f"verl.plugins ({names}). Install the package, or take the name out.{suggest(name, sorted(installed))}"
            )
        with user_code(f"VERL_USE_EXTERNAL_PLUGINS: the plugin {name} cannot be started"):
            start = installed[name].load()
            if callable(start):
                start()
    for name in env.external_modules():
        load_module(name, "VERL_USE_EXTERNAL_MODULES")
