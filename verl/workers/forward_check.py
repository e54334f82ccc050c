"""Helpers for comparing verl's computation of a model with the model's own forward pass, on a few tokens.

Layers that use more than attention masks, keys and values (recurrent layers, convolutions, attention sinks) would mix
packed sequences, or continue a response from a wrong state, without an error. A comparison detects that without a list
of architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

# Largest difference that counts as rounding, relative to the largest number (to 1 if that is smaller).
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def probe_sequences(config: PretrainedConfig, lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return sequences of these lengths, of token ids that are spread over the vocabulary."""
    vocabulary = config.get_text_config().vocab_size
    ids = (torch.arange(1, sum(lengths) + 1, device=device) * 7919) % vocabulary
    return list(ids.split(list(lengths)))


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference between elements at the same place."""
    return float((found - expected).abs().max())


def is_rounding(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether results computed in ``dtype`` differ by rounding only; False if one of ``found`` is NaN.

    Hidden states, (tokens, dimensions), are compared in each dimension with the largest number of that dimension: some
    models have one with numbers in the hundreds, beside which a difference in another one would look like rounding.
    """
    largest = expected.abs().amax(0) if expected.dim() == 2 else expected.abs().max()
    return bool(((found - expected).abs() <= _ROUNDING[dtype] * largest.clamp(min=1.0)).all())


@contextmanager
def short_windows(model: nn.Module, tokens: int) -> Iterator[None]:
    """Shorten sliding windows to at most ``tokens`` inside the context, in layers and in the configs of masks.

    A window that is applied only through a mask, which packed attention does not use, then shows on a short text.
    """
    owners: list[Any] = [owner for module in model.modules() for owner in (module, getattr(module, "config", None))]
    found = {id(owner): owner for owner in owners if _window_of(owner) > tokens}
    before = [(owner, owner.sliding_window) for owner in found.values()]
    try:
        for owner, _ in before:
            owner.sliding_window = tokens
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


def _window_of(owner: object) -> int:
    window = getattr(owner, "sliding_window", None)
    return window if isinstance(window, int) else 0
