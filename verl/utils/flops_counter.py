"""How much arithmetic a training step is, and how much of it a device can do: model FLOP utilisation (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

_BF16_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "L20": 119e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Published dense matrix-product peaks in bf16, FLOP/s; the first name that the device's name holds counts."""


def device_peak_flops(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Matrix products at best, in FLOP/s: the published figure of a known GPU, a measurement on a CPU.

    Args:
        device: of the model.
        dtype: in which it computes. A GPU's figure is the one of bf16 and fp16, so others have none.

    Returns:
        None where no honest figure is known; then there is no MFU to report.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _measured_peak(dtype, torch.get_num_threads())
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _BF16_PEAKS.items() if known in name), None)


@cache
def _measured_peak(dtype: torch.dtype, num_threads: int, size: int = 1024, repeats: int = 4) -> float:
    """The best of a few square matrix products; ``num_threads`` is part of the key.

    PyTorch gives fp32 products to MKL and convolutions to oneDNN. Either may be the faster, by which processor it is.
    """
    del num_threads
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(a)
    image, kernel = a[None, None].permute(0, 3, 1, 2), b[:, :, None, None]  # one line: a column takes twice the time
    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        ways.append(lambda: functional.conv2d(image, kernel))
    return 2 * size**3 / min(_fastest(way, repeats) for way in ways)


def _fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that only prepares."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class FlopsCounter:
    """Arithmetic of one model's passes, from its shape.

    A forward pass takes two operations (multiply, add) per weight of a matrix and token, and in causal attention
    4·D per pair of a token and one that it sees, for heads·head_dim = D; a backward pass takes twice as much:

        3 · (2 · tokens · weights  +  Σ_sequences 4 · D · layers · L (L + 1) / 2)

    Embedding look-ups, norms and activations count as nothing, so do recomputation and padding: it is the useful
    work. A sliding window shortens what a token sees. Of a mixture of experts only the active experts count.

    Args:
        config: the Transformers config of a decoder.
        outputs: of the model's head; None is its vocabulary, a value or reward model has 1.
    """

    def __init__(self, config: PretrainedConfig, outputs: int | None = None) -> None:
        text: Any = config.get_text_config()
        self.hidden_size: int = text.hidden_size
        self.outputs: int = text.vocab_size if outputs is None else outputs
        self.layers: int = text.num_hidden_layers
        heads: int = text.num_attention_heads
        head_dim: int = getattr(text, "head_dim", None) or self.hidden_size // heads
        self.attention_width = heads * head_dim
        kv_width = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        attention = self.hidden_size * 2 * (self.attention_width + kv_width)
        self.weights = self.layers * attention + _feed_forward_weights(text)
        self.windows = _windows(text)

    @classmethod
    def of(cls, config: PretrainedConfig, outputs: int | None = None) -> FlopsCounter | None:
        """A counter, or None if the config is not that of a decoder with attention in its layers."""
        text = config.get_text_config()
        needed = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return cls(config, outputs) if all(getattr(text, name, None) for name in needed) else None

    def forward_flops(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """One forward pass over sequences of these lengths.

        Args:
            lengths: tokens of each sequence.
            head_tokens: tokens at which the output projection is read; None is all.
        """
        tokens = sum(lengths)
        head = 2 * self.hidden_size * self.outputs * (tokens if head_tokens is None else head_tokens)
        pairs = sum(_visible_pairs(length, window) for window in self.windows for length in lengths)
        return float(2 * tokens * self.weights + head + 4 * self.attention_width * pairs)

    def training_flops(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """One forward and one backward pass; as ``forward_flops``."""
        return 3 * self.forward_flops(lengths, head_tokens)

    def estimate_flops(self, batch_seqlens: Sequence[int] | Tensor, delta_time: float) -> tuple[float, float]:
        """Achieved and promised TFLOP/s of a training step, in that order.

        Args:
            batch_seqlens: tokens of each sequence that all ranks computed.
            delta_time: seconds.

        Returns:
            useful TFLOP/s of all ranks together, and the bf16 peak of one device (NaN if unknown).
        """
        lengths = [int(length) for length in batch_seqlens]
        peak = device_peak_flops("cuda" if torch.cuda.is_available() else "cpu")
        return self.training_flops(lengths) / delta_time / 1e12, float("nan") if peak is None else peak / 1e12


@dataclass(frozen=True)
class Arithmetic:
    """What the utilisation of a model is computed from: its useful work, and what its devices can do at best."""

    counter: FlopsCounter | None
    """None for a model whose arithmetic is not known."""
    peak_flops: float | None
    """FLOP/s of one rank, or of all; None where it is not known."""

    @classmethod
    def of_ranks(cls, parts: Sequence[Arithmetic]) -> Arithmetic:
        """One model on several ranks."""
        peaks = [part.peak_flops for part in parts if part.peak_flops is not None]
        return cls(parts[0].counter, sum(peaks) if len(peaks) == len(parts) else None)

    def forward_flops(self, lengths: Sequence[int], head_tokens: int) -> float | None:
        """As ``FlopsCounter.forward_flops``."""
        return None if self.counter is None else self.counter.forward_flops(lengths, head_tokens)

    def training_flops(self, lengths: Sequence[int], head_tokens: int) -> float | None:
        """As ``FlopsCounter.training_flops``."""
        return None if self.counter is None else self.counter.training_flops(lengths, head_tokens)

    def utilization(self, flops: float | None, seconds: float) -> float | None:
        """Model FLOP utilisation (MFU): flops / (seconds · peak); None where something is not known."""
        return None if flops is None or not self.peak_flops else flops / (seconds * self.peak_flops)


def _feed_forward_weights(text: Any) -> int:
    """Weights of gate, up and down projection that each token meets, over all layers."""
    experts_per_token = getattr(text, "num_experts_per_tok", None) or 0
    dense = 3 * text.hidden_size * text.intermediate_size
    if not experts_per_token:
        return text.num_hidden_layers * dense
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    sparse = experts_per_token * 3 * text.hidden_size * width + experts * text.hidden_size
    sparse += 3 * text.hidden_size * (getattr(text, "shared_expert_intermediate_size", None) or 0)
    dense_layers = len(getattr(text, "mlp_only_layers", None) or ())
    return dense_layers * dense + (text.num_hidden_layers - dense_layers) * sparse


def _windows(text: Any) -> list[int | None]:
    """Tokens that a token of each layer sees at most; None is all before it."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * (
        text.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else None for kind in types]


def _visible_pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
