"""How a model can run, packed and with fast layers: tried once, on two short sequences, against its own forward.

A model whose layers look beyond attention masks (recurrent layers, convolutions, attention sinks) would
mix up packed sequences without an error. So would a head that does more to its logits than
``LogitRule`` knows. Both show in this trial, whatever the architecture is called. Sliding windows are made shorter than
its sequences meanwhile, or a window that attention is not told of would not show.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.engine.fsdp.fast_layers import use_fast_layers
from verl.workers.engine.fsdp.inputs import ModelInputs
from verl.workers.engine.fsdp.model import HeadedModel, use_packed_attention
from verl.workers.packed_attention import Packing, short_windows

logger = logging.getLogger(__name__)

_LENGTHS = (5, 3)
_WINDOW = 2
"""Tokens of a sliding window meanwhile."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest number, that is rounding."""


@torch.no_grad()
def choose_form(model: HeadedModel, packed_wanted: bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Give ``model`` packed attention if that is wanted and right for it, and on a CPU fast layers. Collective.

    Args:
        model: placed on its ranks.
        packed_wanted: ``use_remove_padding``.
        device: of the model.
        dtype: in which it computes; says how much difference is rounding.

    Returns:
        whether it runs packed.

    Raises:
        ConfigError: also padded, the model's log-probs cannot be computed by this engine.
    """
    with short_windows(model.hf, _WINDOW):
        return _choose_form(model, packed_wanted, device, dtype)


def _choose_form(model: HeadedModel, packed_wanted: bool, device: torch.device, dtype: torch.dtype) -> bool:
    sequences = _sequences(model, device)
    expected = torch.cat([_run(model, [ids], packed=False, reference=True) for ids in sequences])
    padded = torch.cat([_run(model, [ids], packed=False) for ids in sequences])
    if not _agree(padded, expected, dtype):
        raise ConfigError(
            f"{type(model.hf).__name__} does more to its logits than this engine knows (log-probs differ by "
            f"{_difference(padded, expected):.2g} from the model's own), so it cannot be trained here."
        )
    packed = packed_wanted and _pack(model, sequences, expected, dtype)
    if device.type == "cpu":
        _speed_up(model, sequences, expected, dtype, packed)
    return packed


def _speed_up(model: HeadedModel, sequences: list[Tensor], expected: Tensor, dtype: torch.dtype, packed: bool) -> None:
    """Fast layers, unless this model's layers compute something else than others of their name."""
    undo = use_fast_layers(model)
    batches = [sequences] if packed else [[ids] for ids in sequences]
    found = torch.cat([_run(model, batch, packed) for batch in batches])
    if not _agree(found, expected, dtype):
        undo()
        logger.warning(
            "%s keeps the layers of Transformers, which are slower on a CPU: with fast ones its log-probs differ by "
            "%.2g from its own.",
            type(model.hf).__name__,
            _difference(found, expected),
        )


def _pack(model: HeadedModel, sequences: list[Tensor], expected: Tensor, dtype: torch.dtype) -> bool:
    before = model.hf.config._attn_implementation
    reason = _why_not_packed(model, sequences, expected, dtype)
    if reason is None:
        return True
    model.hf.set_attn_implementation(before)  # pyright: ignore[reportArgumentType]
    logger.warning(
        "%s runs padded: %s. Results are the same, at the cost of the padding; set use_remove_padding=false to "
        "silence this.",
        type(model.hf).__name__,
        reason,
    )
    return False


def _why_not_packed(model: HeadedModel, sequences: list[Tensor], expected: Tensor, dtype: torch.dtype) -> str | None:
    if not use_packed_attention(model):
        return "its code has no exchangeable attention"
    try:
        packed = _run(model, sequences, packed=True)
    except (ConfigError, TypeError) as error:
        return str(error).rstrip(".")
    if not _agree(packed, expected, dtype):
        difference = f"log-probs differ by {_difference(packed, expected):.2g}"
        return f"packed sequences see each other, or past a window that attention is not told of ({difference})"
    return None


def _sequences(model: HeadedModel, device: torch.device) -> list[Tensor]:
    vocabulary = model.hf.config.get_text_config().vocab_size
    ids = (torch.arange(1, sum(_LENGTHS) + 1, device=device) * 7919) % vocabulary
    return list(ids.split(_LENGTHS))


def _run(model: HeadedModel, sequences: list[Tensor], packed: bool, reference: bool = False) -> Tensor:
    """At each token, the log-prob of that token itself (as good a probe as any), or the hidden state."""
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(part), device=ids.device) for part in sequences])
    everything = torch.arange(len(ids), device=ids.device)
    inputs = ModelInputs(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        attention_mask=None if packed else torch.ones_like(ids, dtype=torch.bool).unsqueeze(0),
        packing=Packing.of([len(part) for part in sequences], ids.device) if packed else None,
        take=everything,
        targets=ids,
        rows=torch.zeros_like(ids),
        columns=everything,
        shape=(1, len(ids)),
    )
    language = "reference" if reference else "log_probs"
    name = "hidden" if model.head.out_features == 1 else language
    return model(inputs, frozenset({name}), 1.0)[name].float()


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """The same decision on every rank."""
    tolerance = _TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    verdict = torch.tensor(float(_difference(found, expected) <= tolerance), device=expected.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict)
