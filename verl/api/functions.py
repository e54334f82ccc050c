"""Functions and classes given as objects, written into a Python file that any process of a run can import."""

from __future__ import annotations

import base64
import os
import pickle
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import cloudpickle

from verl.base.import_utils import unload_module
from verl.errors import ConfigError

MODULE = "functions.py"
_TEMPLATE = '''"""Functions that a call of verl was given as objects; this file is made anew where they change."""

import base64
import sys

import cloudpickle

sys.path.extend(folder for folder in {path!r} if folder not in sys.path)
_objects = cloudpickle.loads(
    base64.b64decode(
        b"""
{content}
"""
    )
)
{names}
'''
_LINE = 110
"""Characters of a line of base64 in the written module."""


def write_module(objects: Mapping[str, object], folder: Path) -> Path:
    """Write a Python file in whose namespace the objects stand by name.

    Objects of importable modules are written as references, others by value, with what they refer to. The file keeps
    its name, so that a resumed run is recognised as the same; this process imports it anew.

    Raises:
        ConfigError: an object cannot be sent to another process, or belongs to another version of Python.
    """
    for name, value in objects.items():
        try:
            cloudpickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{name} cannot be sent to the processes that call it: {error}. It, or something that it refers to, "
                "exists in this process alone, such as an open file, a lock or a connection. Make it inside the "
                "function."
            ) from error
    content = base64.b64encode(cloudpickle.dumps(dict(objects))).decode()
    lines = "\n".join(content[start : start + _LINE] for start in range(0, len(content), _LINE))
    # Names are assigned one by one: checks of the configuration read the file without running it.
    names = "\n".join(f'{name} = _objects["{name}"]' for name in objects)
    text = _TEMPLATE.format(path=[folder for folder in sys.path if folder], content=lines, names=names)
    path = folder / MODULE
    folder.mkdir(parents=True, exist_ok=True)
    # It has what the functions refer to, which may be a key, so other accounts must not read it.
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    unload_module(path)
    return path


def with_resolved_types(function: Callable[..., object]) -> Callable[..., object]:
    """Copy a function whose annotations are texts, with the types in their place.

    A function that travels by value has only those global names with it that its code uses, not those of its types.

    Raises:
        ConfigError: an annotation names something that does not exist.
    """
    if not isinstance(function, types.FunctionType) or not any(
        isinstance(value, str) for value in function.__annotations__.values()
    ):
        return function
    try:
        resolved = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise ConfigError(f"the types of {function.__qualname__} cannot be read: {error}.") from error
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__doc__, copy.__module__, copy.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    copy.__annotations__ = resolved
    return copy
