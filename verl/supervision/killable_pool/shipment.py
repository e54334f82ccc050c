"""Serialize a function for another process, by its importable name if possible, else by value."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import partial

from verl.base.import_utils import USER_MODULE, source_digest
from verl.errors import ConfigError


def pack(function: Callable[..., object], fatal: tuple[type[Exception], ...]) -> dict[str, object]:
    """Return what a worker needs to load the function: ``path`` for imports, ``first`` calls, ``function`` to unpickle.

    A function from a user's file is loaded from that file again, and the modules of
    ``VERL_USE_EXTERNAL_MODULES`` are imported, so that their registrations exist there too.

    Raises:
        ConfigError: the function can be neither imported nor pickled.
    """
    pickled = _pickled(function, fatal)
    first: list[tuple[str, str, tuple[object, ...]]] = [("verl.base.import_utils", "prepare_process", ())]
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULE) and name.encode() in pickled:  # the pickle refers to the module by this name
            arguments = (module.__file__, "custom_reward_function.path", source_digest(module))
            first.append(("verl.base.import_utils", "load_module", arguments))
    return {"path": list(sys.path), "first": first, "function": pickled}


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a call returns a coroutine, also through ``functools.partial`` and ``__call__``."""
    below = unwrapped(function)
    return inspect.iscoroutinefunction(below) or inspect.iscoroutinefunction(getattr(below, "__call__", None))  # noqa: B004


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    """The function below any ``functools.partial``."""
    while isinstance(function, partial):
        function = function.func
    return function


def _pickled(function: Callable[..., object], fatal: tuple[type[Exception], ...]) -> bytes:
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # a lambda or a local function
        pickled = pickle.dumps((function, fatal))
        if b"__main__" not in pickled:  # in the worker, __main__ is another module
            return pickled
    name = getattr(unwrapped(function), "__qualname__", repr(function))
    remedy = "Put it at the top level of a file, and import or name it from there."
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the function {name} cannot be imported by another process, and the package that would send it by "
            f"value, cloudpickle, is not installed. {remedy} Or: pip install cloudpickle."
        ) from error
    try:
        return cloudpickle.dumps((function, fatal))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"the function {name} cannot be sent to another process: {error}. {remedy}") from error
