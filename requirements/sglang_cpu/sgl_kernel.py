"""Stands in for SGLang's CUDA kernels, which have no build for a CPU on PyPI: SGLang imports their names to start.

None of them runs with the attention and sampling backends of a CPU; one that does raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU and the package sglang-kernel")

    missing.__name__ = name
    return missing
