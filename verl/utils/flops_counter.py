"""FLOPs of a model's passes and peak FLOP/s of a device, for model FLOP utilisation (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from verl.utils.model_facts.experts import ExpertSizes

if TYPE_CHECKING:  # counting needs neither; measuring a peak imports PyTorch where it does
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

# Published peaks of dense bf16 matrix products, FLOP/s. The first key contained in the device's name counts.
_BF16_PEAKS = {
    "GB200": 2500e12,
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

_RECURRENT = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}
"""Kinds of layers with a convolution or a recurrence in place of attention, or beside it."""
_WITH_GATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""``model_type`` of the models whose queries have a gate each, as wide as they are."""


def published_peak(name: str) -> float | None:
    """Return the published peak FLOP/s of dense bf16 products of a GPU by its name; None for an unknown one."""
    return next((peak for gpu, peak in _BF16_PEAKS.items() if gpu in name), None)


def device_peak_flops(device: torch.device | str, dtype: torch.dtype | None = None) -> float | None:
    """Return the peak FLOP/s of matrix products: published for a known GPU, measured on a CPU.

    ``dtype`` is bf16 unless it is given. Returns None for an unknown GPU, and on GPUs for dtypes other than bf16 and
    fp16, which the table does not cover.
    """
    import torch

    device, dtype = torch.device(device), dtype or torch.bfloat16
    if device.type == "cpu":
        return _measured_peak(dtype, torch.get_num_threads())
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return published_peak(torch.cuda.get_device_name(device))


@cache
def _measured_peak(dtype: torch.dtype, num_threads: int) -> float:
    """Peak FLOP/s over a few square matrix products, cached by dtype and number of threads."""
    del num_threads  # only a key of the cache
    small = _flops_of_products(dtype, size=256)
    # A processor without instructions for bf16 reaches less than a GFLOP/s, and in small products as much as in others.
    return small if small < 5e9 else max(small, _flops_of_products(dtype, size=1024))


def _flops_of_products(dtype: torch.dtype, size: int, repeats: int = 4) -> float:
    """FLOP/s of the fastest of ``repeats`` products of two matrices of ``size`` × ``size``."""
    import torch
    from torch.nn import functional

    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(a)
    # An image of one row; one of one column takes twice the time.
    image, kernel = a[None, None].permute(0, 3, 1, 2), b[:, :, None, None]
    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    # PyTorch computes fp32 products with MKL and convolutions with oneDNN; which is faster depends on the processor.
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        ways.append(lambda: functional.conv2d(image, kernel))
    return 2 * size**3 / min(_fastest(way, repeats) for way in ways)


def _fastest(call: Callable[[], object], repeats: int) -> float:
    """Minimum duration in seconds over ``repeats`` calls, after a warm-up call."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class FlopsCounter:
    """Useful FLOPs of a decoder's passes, computed from its shape.

    A forward pass takes two operations (multiply, add) per token and matrix weight, and in causal attention 4·D per
    pair of a token and one that it attends to, with D = heads · head_dim. A backward pass takes twice as much:

        3 · (2 · tokens · weights  +  Σ_sequences 4 · D · layers · L (L + 1) / 2)

    Embedding look-ups, norms, activations, recomputation and padding are not counted. A sliding window limits the
    number of attended tokens. In a mixture of experts only the active experts count. With latent attention
    (DeepSeek-V3) D is the mean of the widths of all heads' scores and values.

    Args:
        config: the Transformers config of a decoder, or any object with the fields of one.
        outputs: width of the model's head; None is the vocabulary size, a value or reward model has 1.
        is_frozen: whether the weights get no gradients, whose products a backward pass then lacks, because adapters
            are trained; those of the adapters are not counted.
        heads: of multi-token prediction that are trained, each of which adds to an update a layer like the last one, a
            product with both its inputs (2 · hidden²) and logits.
    """

    def __init__(
        self, config: PretrainedConfig, outputs: int | None = None, is_frozen: bool = False, heads: int = 0
    ) -> None:
        self.is_frozen = is_frozen
        self.heads = heads
        text = _text_config(config)
        self.hidden_size: int = text.hidden_size
        self.outputs: int = text.vocab_size if outputs is None else outputs
        self.layers: int = text.num_hidden_layers
        attention_heads: int = text.num_attention_heads
        head_dim: int = getattr(text, "head_dim", None) or self.hidden_size // attention_heads
        if getattr(text, "kv_lora_rank", None):
            attention, score_width, value_width = _latent_attention(text)
        else:
            score_width = value_width = attention_heads * head_dim
            kv_width = (getattr(text, "num_key_value_heads", None) or attention_heads) * head_dim
            attention = self.hidden_size * 2 * (score_width + kv_width)
        self.pair_flops = 2 * (score_width + value_width)
        """FLOPs of one layer for a pair of a token and one that it attends to."""
        recurrent = sum(kind == "linear_attention" for kind in getattr(text, "layer_types", None) or ())
        if getattr(text, "model_type", None) in _WITH_GATES:
            attention += self.hidden_size * score_width
        feed_forward = _feed_forward_weights(text)
        self.weights = (self.layers - recurrent) * attention + sum(feed_forward)
        if recurrent:
            self.weights += recurrent * _delta_net_products(text)
        self.head_weights = attention + feed_forward[-1] + 2 * self.hidden_size**2
        self.windows = _windows(text)

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, outputs: int | None = None, is_frozen: bool = False, heads: int = 0
    ) -> FlopsCounter | None:
        """Create a counter; None if the config is not one of a decoder with attention layers and gated delta nets."""
        text = _text_config(config)
        recurrent = _RECURRENT & set(getattr(text, "layer_types", None) or ())
        if recurrent and not (recurrent == {"linear_attention"} and getattr(text, "linear_num_value_heads", None)):
            return None
        needed = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return cls(config, outputs, is_frozen, heads) if all(getattr(text, name, None) for name in needed) else None

    def forward_flops(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """FLOPs of one forward pass over sequences of these lengths in tokens.

        ``head_tokens`` is the number of tokens for which the output projection is computed; None is all.
        """
        tokens = sum(lengths)
        head = 2 * self.hidden_size * self.outputs * (tokens if head_tokens is None else head_tokens)
        return float(2 * tokens * self.weights + head) + self._attention_flops(lengths)

    def _attention_flops(self, lengths: Sequence[int]) -> float:
        pairs = sum(_visible_pairs(length, window) for window in self.windows for length in lengths)
        return float(self.pair_flops * pairs)

    def training_flops(self, lengths: Sequence[int], head_tokens: int | None = None) -> float:
        """FLOPs of one forward and one backward pass; arguments as in :meth:`forward_flops`."""
        forward = self.forward_flops(lengths, head_tokens)
        attention = self._attention_flops(lengths)
        if self.heads:
            tokens = sum(lengths)
            logits = self.hidden_size * self.outputs * (tokens if head_tokens is None else head_tokens)
            head_flops = 2 * tokens * self.head_weights + 2 * logits + attention / self.layers
            forward, attention = forward + self.heads * head_flops, attention * (1 + self.heads / self.layers)
        return 2 * forward + attention if self.is_frozen else 3 * forward

    def estimate_flops(
        self, batch_seqlens: Sequence[int] | Tensor, delta_time: float, **kargs: object
    ) -> tuple[float, float]:
        """Useful TFLOP/s of a training step over all ranks, and the bf16 peak of one device (NaN if unknown).

        ``batch_seqlens`` are the tokens of each sequence over all ranks, ``delta_time`` the seconds of the step.
        Public code passes further arguments, on images and the like; they have no effect on a language model.
        """
        import torch

        lengths = [int(length) for length in batch_seqlens]
        peak = device_peak_flops("cuda" if torch.cuda.is_available() else "cpu")
        return self.training_flops(lengths) / delta_time / 1e12, float("nan") if peak is None else peak / 1e12


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs counter and peak FLOP/s, from which the utilisation of a model is computed."""

    counter: FlopsCounter | None
    """None for a model whose FLOPs cannot be counted."""
    peak_flops: float | None
    """Peak FLOP/s of one rank, or of all ranks together after :meth:`from_ranks`; None if unknown."""

    @classmethod
    def from_ranks(cls, parts: Sequence[Arithmetic]) -> Arithmetic:
        """Combine the values of several ranks with the same model."""
        peaks = [part.peak_flops for part in parts if part.peak_flops is not None]
        return cls(parts[0].counter, sum(peaks) if len(peaks) == len(parts) else None)

    def forward_flops(self, lengths: Sequence[int], head_tokens: int, repeated: Sequence[int] = ()) -> float | None:
        """As :meth:`FlopsCounter.forward_flops`; None without a counter.

        ``repeated`` are the lengths of first parts of sequences that are not computed, because others have the same.
        """
        counter = self.counter
        return counter and counter.forward_flops(lengths, head_tokens) - counter.forward_flops(repeated, 0)

    def training_flops(self, lengths: Sequence[int], head_tokens: int, repeated: Sequence[int] = ()) -> float | None:
        """As :meth:`FlopsCounter.training_flops`, with ``repeated`` as in :meth:`forward_flops`."""
        counter = self.counter
        return counter and counter.training_flops(lengths, head_tokens) - counter.training_flops(repeated, 0)

    def utilization(self, flops: float | None, seconds: float) -> float | None:
        """Model FLOP utilisation (MFU): flops / (seconds · peak); None if one of them is unknown."""
        return None if flops is None or not self.peak_flops else flops / (seconds * self.peak_flops)


def _text_config(config: Any) -> Any:
    """Return the config of a model's decoder; one that is no Transformers config may have it in ``text_config``."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return getattr(config, "text_config", None) or config


def _feed_forward_weights(text: Any) -> list[int]:
    """Number of feed-forward weights (gate, up and down projection) used per token, of each layer."""
    hidden, experts = text.hidden_size, ExpertSizes.from_config(text)
    dense = 3 * hidden * text.intermediate_size
    if experts is None:
        return [dense] * text.num_hidden_layers
    sparse = 3 * hidden * (experts.per_token * experts.width + experts.shared_width) + experts.count * hidden
    return [sparse if has_experts else dense for has_experts in experts.sparse]


def _latent_attention(text: Any) -> tuple[int, int, int]:
    """Weights of a layer's multi-head latent attention (arXiv:2405.04434), and widths of all scores and values."""
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    plain, rotated, value_dim = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    score_width, value_width = heads * (plain + rotated), heads * value_dim
    query_rank = getattr(text, "q_lora_rank", None)
    queries = query_rank * (hidden + score_width) if query_rank else hidden * score_width
    keys_and_values = hidden * (rank + rotated) + rank * heads * (plain + value_dim)
    return queries + keys_and_values + value_width * hidden, score_width, value_width


def _delta_net_products(text: Any) -> int:
    """Products of numbers per token in a gated delta net: projections, convolution, and the recurrence.

    For each head the state, (key numbers x value numbers), is read by a key and by a query, and a product is added.
    """
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    projections = text.hidden_size * (2 * keys + 3 * values + 2 * text.linear_num_value_heads)
    return projections + text.linear_conv_kernel_dim * (2 * keys + values) + 3 * text.linear_key_head_dim * values


def _windows(text: Any) -> list[int | None]:
    """Attention window of each layer with attention, in tokens; None for full causal attention."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * (
        text.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else None for kind in types if kind != "linear_attention"]


def _visible_pairs(length: int, window: int | None) -> int:
    """Number of pairs of a token and one that it attends to, itself included."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
