"""Checks of the parameters and results of registered functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set

from torch import Tensor

from verl.base.registry import suggest
from verl.errors import ConfigError

Parameters = Mapping[str, inspect.Parameter]


def is_required(parameter: inspect.Parameter) -> bool:
    """Return whether the parameter has no default and is not variadic."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def takes_kwargs(parameters: Parameters) -> bool:
    """Return whether there is a ``**kwargs`` among the parameters."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def refuse_unknown(owner: str, parameter: inspect.Parameter, names: Set[str]) -> None:
    """Check that a parameter will be given a value.

    Raises:
        ConfigError: it is required and not among ``names``, or it has a default and looks like a misspelt known name.
    """
    if parameter.name in names or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return
    hint = suggest(parameter.name, sorted(names))
    if is_required(parameter) or hint:
        raise ConfigError(
            f"{owner} has an unknown parameter '{parameter.name}'.{hint} Parameters may be "
            f"{', '.join(sorted(names))}; **kwargs, which receives your own columns; or a constant with a default."
        )


def describe_result(result: object) -> str:
    """The types and shapes that a function returned, for an error message."""
    if isinstance(result, (tuple, list)):
        return f"{type(result).__name__} of {', '.join(map(describe_result, result)) or 'nothing'}"
    return f"Tensor {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
