"""Stands in for SGLang's kernels, which have no build for a CPU on PyPI: SGLang imports their names to start.

None of them runs with the attention and sampling backends of a CPU; one that does raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

# The module of Qwen3.5, which the processor of all models with images of that family imports, looks these up.
_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
_declared = torch.library.Library("sgl_kernel", "FRAGMENT")
"""Declarations without an implementation; they end with it."""
for _name in _OPERATORS:
    _declared.define(f"{_name}(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU and the package sglang-kernel")

    missing.__name__ = name
    return missing
