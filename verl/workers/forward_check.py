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
    # Steps of a prime: no id comes twice before all others have come.
    ids = (torch.arange(1, sum(lengths) + 1, device=device) * 7919) % vocabulary
    return list(ids.split(list(lengths)))


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference between elements at the same place."""
    return float((actual - expected).abs().max())


def is_rounding(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether results computed in ``dtype`` differ by rounding only; False if one of ``actual`` is NaN.

    Hidden states, (tokens, dimensions), are compared in each dimension with its own largest number: some models have a
    dimension with numbers in the hundreds, beside which a difference in another one would look like rounding.
    """
    largest = expected.abs().amax(0) if expected.dim() == 2 else expected.abs().max()
    return bool(((actual - expected).abs() <= _ROUNDING[dtype] * largest.clamp(min=1.0)).all())


@contextmanager
def short_windows(model: nn.Module, tokens: int) -> Iterator[None]:
    """Shorten sliding windows to at most ``tokens`` inside the context, in layers and in the configs of masks.

    A window that is applied only through a mask, which packed attention does not use, then shows on a short text.
    """
    owners: list[Any] = [owner for module in model.modules() for owner in (module, getattr(module, "config", None))]
    # By identity, as layers share a config, whose window would be saved again after it was changed.
    before = {
        id(owner): (owner, window)
        for owner in owners
        if isinstance(window := getattr(owner, "sliding_window", None), int) and window > tokens
    }
    try:
        for owner, _ in before.values():
            owner.sliding_window = tokens
        yield
    finally:
        for owner, window in before.values():
            owner.sliding_window = window
