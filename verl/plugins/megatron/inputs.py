"""Model inputs as megatron-core takes them: packed in one row, or padded at the ends of rows only."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional

from verl.plugins.megatron.prediction import TokensAhead, tokens_ahead
from verl.protocol import DataProto
from verl.vision.families import VisionConfig
from verl.workers.engine.model.inputs import ModelInputs, divide, prepare_inputs
from verl.workers.packed_attention import Packing
from verl.workers.routers import unknown


def megatron_inputs(
    batch: DataProto,
    packed: bool,
    device: torch.device,
    at_token: bool = False,
    multiple: int = 1,
    group: dist.ProcessGroup | None = None,
    vision: VisionConfig | None = None,
    needs_pixels: bool = True,
    heads: int = 0,
) -> tuple[ModelInputs, tuple[TokensAhead, ...]]:
    """Remove the padding before each sequence, and all padding if ``packed``.

    What follows a sequence in its row is never attended to; ``attention_mask`` of the result is False there. Arguments
    as for :func:`prepare_inputs`; this rank's part of a row has a multiple of ``multiple`` tokens. A rank without the
    vision tower has no use for images (``needs_pixels``). Also returns what each of ``heads`` heads of multi-token
    prediction reads and predicts.
    """
    inputs = prepare_inputs(batch, packed=True, device=torch.device("cpu"), at_token=at_token, vision=vision)
    assert inputs.packing is not None
    lengths = inputs.packing.lengths
    if not needs_pixels:
        inputs = replace(inputs, images=None)
    parts = 1 if group is None else dist.get_world_size(group)
    inputs = (_with_rest if packed else _in_rows)(inputs, lengths, multiple * parts)
    mask, routed = inputs.attention_mask, inputs.routed_experts
    assert mask is not None
    if routed is not None:  # of the tokens alone, in their order
        at_tokens = mask.flatten()
        routers_choose = routed.new_full((len(at_tokens), *routed.shape[1:]), unknown(routed.dtype))
        routers_choose[at_tokens] = routed
        inputs = replace(inputs, routed_experts=routers_choose)
    response_mask = batch.batch["response_mask"].cpu()
    ahead = tuple(tokens.to(device) for tokens in tokens_ahead(inputs, response_mask, heads, group))
    if group is None:
        return inputs.to(device), ahead
    divided = divide(replace(inputs, real=mask), group)
    return replace(divided, attention_mask=divided.real).to(device), ahead


def _with_rest(inputs: ModelInputs, lengths: tuple[int, ...], multiple: int) -> ModelInputs:
    """Pad a packed row by a sequence of its own, to which no other attends."""
    rest = -sum(lengths) % multiple
    inputs = replace(inputs, attention_mask=(torch.arange(sum(lengths) + rest) < sum(lengths))[None])
    if not rest:
        return inputs
    positions, images = inputs.position_ids, inputs.images
    return replace(
        inputs,
        input_ids=functional.pad(inputs.input_ids, (0, rest)),
        position_ids=torch.cat([positions, torch.arange(rest).expand(*positions.shape[:-1], rest)], dim=-1),
        packing=Packing.from_lengths([*lengths, rest], inputs.input_ids.device),
        images=None if images is None else replace(images, places=functional.pad(images.places, (0, rest))),
    )


def _in_rows(inputs: ModelInputs, lengths: tuple[int, ...], multiple: int) -> ModelInputs:
    """Lay out one sequence a row, padded at the end."""
    width = max(lengths) + -max(lengths) % multiple
    ids = inputs.input_ids.new_zeros(len(lengths), width)
    places = torch.cat([row * width + torch.arange(length) for row, length in enumerate(lengths)])
    ids.view(-1)[places] = inputs.input_ids[0]
    axes = inputs.position_ids.shape[:-2]  # (4,) of a model with images
    positions = torch.arange(width).repeat(*axes, len(lengths), 1)
    positions.flatten(-2)[..., places] = inputs.position_ids.squeeze(-2)
    images = inputs.images
    if images is not None:
        is_image = torch.zeros(len(lengths), width, dtype=torch.bool)
        is_image.view(-1)[places] = images.places[0]
        images = replace(images, places=is_image)
    return replace(
        inputs,
        input_ids=ids,
        position_ids=positions,
        attention_mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        packing=None,
        take=places[inputs.take],
        images=images,
    )
