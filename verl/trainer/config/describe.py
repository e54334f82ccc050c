"""Types and bounds in words, for messages and for the reference."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def allowed_values(field: FieldInfo) -> str:
    """Type and bounds of a field, such as ``an integer >= 1, or null``."""
    return _options(field.annotation, _bounds(field))


def _options(annotation: Any, bounds: str = "") -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    # Literal[...] | None is a typing.Union, int | None a types.UnionType.
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if is_union else (annotation,)
    return ", or ".join(_word(option) + (bounds if option in (int, float) else "") for option in options)


def _word(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        if typing.get_origin(items[0]) is typing.Literal:
            return f"a list of {_word(items[0])}"
        plural = {int: "integers", float: "numbers", str: "strings"}[items[0]]
        return f"a list of {plural}" if Ellipsis in arguments else f"a list of {len(items)} {plural}"
    if origin is dict:
        return "a mapping"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> str:
    parts = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in _SIGNS.items()
        if hasattr(constraint, name)
    ]
    return (" " + " and ".join(parts)) if parts else ""
