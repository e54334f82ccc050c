"""Model inputs as megatron-core takes them: packed in one row, or padded at the ends of rows only."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.workers.engine.fsdp.inputs import ModelInputs, prepare_inputs
from verl.workers.packed_attention import Packing


def megatron_inputs(
    batch: DataProto, packed: bool, device: torch.device, at_token: bool = False, multiple: int = 1
) -> ModelInputs:
    """Remove the padding before each sequence, and all padding if ``packed``.

    megatron-core takes a token's place in its row for its position, so every sequence begins at place 0; what follows
    a sequence in its row is never attended to; ``attention_mask`` of the result is False there. Arguments as for
    :func:`prepare_inputs`; the row length is a multiple of ``multiple``.

    Raises:
        SchemaError: as :func:`prepare_inputs`, or positions do not count up by 1 within a sequence.
    """
    inputs = prepare_inputs(batch, packed=True, device=torch.device("cpu"), at_token=at_token)
    assert inputs.packing is not None
    lengths = inputs.packing.lengths
    _check_positions(inputs.position_ids[0], lengths)
    divided = _with_rest(inputs, lengths, multiple) if packed else _in_rows(inputs, lengths, multiple)
    return divided.to(device)


def _check_positions(positions: Tensor, lengths: tuple[int, ...]) -> None:
    for row, part in enumerate(positions.split(list(lengths))):
        if bool((part.diff() != 1).any()):
            raise SchemaError(
                f"sequence {row} of the pass has position_ids that do not count up by 1, which strategy=megatron "
                "cannot compute. Use strategy=fsdp2."
            )


def _with_rest(inputs: ModelInputs, lengths: tuple[int, ...], multiple: int) -> ModelInputs:
    """Pad a packed row by a sequence of its own, to which no other attends."""
    rest = -sum(lengths) % multiple
    inputs = replace(inputs, attention_mask=(torch.arange(sum(lengths) + rest) < sum(lengths))[None])
    if not rest:
        return inputs
    return replace(
        inputs,
        input_ids=functional.pad(inputs.input_ids, (0, rest)),
        position_ids=torch.cat([inputs.position_ids, torch.arange(rest)[None]], dim=1),
        packing=Packing.of([*lengths, rest], inputs.input_ids.device),
    )


def _in_rows(inputs: ModelInputs, lengths: tuple[int, ...], multiple: int) -> ModelInputs:
    """One sequence a row, padded at the end."""
    width = max(lengths) + -max(lengths) % multiple
    ids = inputs.input_ids.new_zeros(len(lengths), width)
    places = torch.cat([row * width + torch.arange(length) for row, length in enumerate(lengths)])
    ids.view(-1)[places] = inputs.input_ids[0]
    return replace(
        inputs,
        input_ids=ids,
        position_ids=torch.arange(width).expand(len(lengths), -1),
        attention_mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        packing=None,
        take=places[inputs.take],
    )
