"""The tensor columns of training sequences: one maker for responses of a batch and for conversations of agent loops.

Columns:
    prompts                          (bsz, prompt_length), padded on the left; as they were given, not copied
    responses, response_mask,
    rollout_log_probs                (bsz, response_length), padded on the right
    input_ids, attention_mask,
    position_ids                     (bsz, prompt_length + response_length), with images (bsz, 4, ...)
    weight_versions                  (bsz, response_length) int32, version of the weights that drew each token, -1 where
                                     the policy drew none
    routed_experts                   (bsz, prompt_length + response_length, layers, experts per token), if those of some
                                     token are known
    kept_ids                         (bsz, response_length, K) int32, ids of the tokens that truncated sampling kept,
                                     then -1; all -1 where they are not known, if those of some token are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.rows import fill_column, widen_column, with_equal_columns
from verl.vision.families import VisionConfig
from verl.vision.positions import sequence_positions
from verl.workers.rollout.request import NO_WEIGHTS, NOT_KEPT, RolloutOutput, widened
from verl.workers.routers import unknown

PromptTokens = tuple[Tensor, Tensor]
"""(bsz, prompt_length) tokens, padded on the left, and their mask."""


@dataclass(frozen=True)
class ResponseRow:
    """The part of a training sequence that follows the prompt."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """log p of each token under the engine, 0 where the policy did not draw it; 0 for all tokens beyond."""
    routed_experts: Tensor | None = None
    """(tokens of prompt and response, layers, experts per token); None if unknown. See :mod:`verl.workers.routers`."""
    response_mask: Sequence[int] | None = None
    """1 on tokens that the policy drew; None if it drew all. All rows of a batch have one, or none has."""
    weight_versions: Sequence[int] = ()
    """Version of the weights that drew each token, -1 where the policy did not draw it, and for all tokens beyond."""
    kept_ids: Tensor | None = None
    """(response tokens, K) as of :class:`~verl.workers.rollout.request.RolloutOutput`; None if unknown."""


def sequence_columns(
    prompts: PromptTokens,
    rows: Sequence[ResponseRow],
    response_length: int,
    pad_token_id: int,
    images: tuple[Sequence[Mapping[str, Tensor]], VisionConfig] | None = None,
) -> dict[str, Tensor]:
    """Return the columns listed at the top of this module.

    Args:
        prompts: of all rows.
        rows: the response of each prompt.
        response_length: width to which responses are padded.
        pad_token_id: stands where there is no token.
        images: of a model with images: those of each row (see :func:`verl.vision.positions.sequence_positions`), and
            how the model places them.
    """
    responses, has_token = _padded([row.token_ids for row in rows], response_length, pad_token_id)
    log_probs, _ = _padded([row.log_probs for row in rows], response_length, 0.0)
    versions, _ = _padded([row.weight_versions for row in rows], response_length, NO_WEIGHTS)
    masks = [row.response_mask for row in rows if row.response_mask is not None]
    response_mask = _padded(masks, response_length, 0)[0] if masks else has_token
    input_ids = torch.cat([prompts[0], responses], dim=-1)
    attention_mask = torch.cat([prompts[1], has_token], dim=-1)
    return {
        "prompts": prompts[0],
        "responses": responses,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)
        if images is None
        else sequence_positions(input_ids, attention_mask, response_mask, *images),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "weight_versions": versions.int(),
        **_routing_column([row.routed_experts for row in rows], prompts[1], response_length),
        **_kept_column([row.kept_ids for row in rows], response_length),
    }


def columns_from_outputs(
    prompts: DataProto,
    outputs: list[RolloutOutput],
    response_length: int,
    pad_token_id: int,
    vision: VisionConfig | None = None,
) -> DataProto:
    """Return the columns of the responses to a batch of prompts, with ``finish_reason`` and ``weight_version`` of each.

    Args:
        prompts: see :mod:`verl.workers.rollout.request`.
        outputs: the response to each row.
        response_length: width to which responses are padded.
        pad_token_id: stands where there is no token.
        vision: of a model with images.
    """
    images = None
    # Prompts of a data set for text have positions of one axis also where the model could read images.
    if vision is not None and "position_ids" in prompts.batch.keys() and prompts.batch["position_ids"].dim() == 3:
        row_images = prompts.non_tensor_batch.get("multi_modal_inputs", [None] * len(outputs))
        images = [inputs or {} for inputs in row_images], vision
    return DataProto.from_dict(
        tensors=sequence_columns(
            (prompts.batch["input_ids"].cpu(), prompts.batch["attention_mask"].cpu()),
            [
                ResponseRow(
                    output.token_ids,
                    output.log_probs,
                    output.routed_experts,
                    weight_versions=output.weight_versions,
                    kept_ids=output.kept_ids,
                )
                for output in outputs
            ],
            response_length,
            pad_token_id,
            images,
        ),
        non_tensors={
            "finish_reason": np.array([output.finish_reason for output in outputs], dtype=object),
            "weight_version": np.array([output.weight_version for output in outputs]),
        },
    )


def with_weight_versions(batch: DataProto) -> DataProto:
    """Return a batch with the column ``weight_versions``, also if an earlier version of verl stored it without."""
    if "weight_versions" in batch.batch.keys() or "weight_version" not in batch.non_tensor_batch:
        return batch
    versions = torch.tensor(batch.non_tensor_batch["weight_version"].astype(np.int32))
    is_drawn = batch.batch["response_mask"].bool()
    return batch | DataProto.from_dict({"weight_versions": torch.where(is_drawn, versions[:, None], NO_WEIGHTS).int()})


def padded_prompts(prompt_ids: Sequence[Sequence[int]], prompt_length: int, pad_token_id: int) -> PromptTokens:
    """Pad prompts on the left to (bsz, prompt_length)."""
    return _padded(prompt_ids, prompt_length, pad_token_id, left=True)


def _padded(rows: Sequence[Sequence[float]], length: int, padding: float, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad rows to (bsz, length); return them, and the mask that is 1 on their values.

    The values are float32 if ``padding`` is a float, else int64.
    """
    counts = torch.tensor([len(row) for row in rows])
    positions = torch.arange(length)
    has_value = positions >= length - counts[:, None] if left else positions < counts[:, None]  # (bsz, length)
    dtype = torch.float32 if isinstance(padding, float) else torch.long
    values = torch.full((len(rows), length), padding, dtype=dtype)
    values[has_value] = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return values, has_value.long()


def _routing_column(
    routed_experts: Sequence[Tensor | None], prompt_mask: Tensor, response_length: int
) -> dict[str, Tensor]:
    """Return the column ``routed_experts`` if a row has it."""
    example = next((routing for routing in routed_experts if routing is not None), None)
    if example is None:
        return {}
    width = prompt_mask.shape[1]
    size = len(routed_experts), width + response_length, *example.shape[1:]
    column = torch.full(size, unknown(example.dtype), dtype=example.dtype)
    for row, routing, length in zip(column, routed_experts, prompt_mask.sum(-1).tolist(), strict=True):
        if routing is not None:
            row[width - length : width - length + len(routing)] = routing.cpu()
    return {"routed_experts": column}


def joined_rows(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate batches of responses, of which some lack a column, or have ``kept_ids`` of fewer columns."""
    parts = fill_column(with_equal_columns(parts), "routed_experts", unknown)
    parts = fill_column(parts, "kept_ids", lambda _: NOT_KEPT)
    return DataProto.concat(widen_column(parts, "kept_ids", NOT_KEPT))


def _kept_column(kept_ids: Sequence[Tensor | None], response_length: int) -> dict[str, Tensor]:
    """Return the column ``kept_ids`` if a row has it."""
    width = max((ids.shape[1] for ids in kept_ids if ids is not None), default=None)
    if width is None:
        return {}
    column = torch.full((len(kept_ids), response_length, width), NOT_KEPT, dtype=torch.int32)
    for row, ids in zip(column, kept_ids, strict=True):
        if ids is not None:
            row[: len(ids)] = widened(ids, width)
    return {"kept_ids": column}
