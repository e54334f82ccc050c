"""Rows as a teacher reads them: the same responses, under a prompt of the teacher's own where the batch has one."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto, replace_columns
from verl.protocol.shared import SharedTensors
from verl.schema import require
from verl.utils.model import compute_position_id_with_mask
from verl.vision.families import TEXT_PLACES, VisionConfig
from verl.vision.positions import sequence_positions

TEACHER_PROMPTS = ("teacher_prompts", "teacher_prompts_mask")
"""Columns of the prompts that a teacher reads instead of the policy's."""


IMAGES = "multi_modal_inputs"


def rows_for_teacher(batch: DataProto, vision: VisionConfig | None = None) -> DataProto:
    """Replace the prompts of a batch by ``teacher_prompts``; the batch itself without that column.

    Images stay those of the rows. Columns of whole sequences that belong to the policy's prompts, such as
    ``routed_experts``, are left out.

    Args:
        batch: rows with the policy's responses.
        vision: of a model with images, whose positions depend on them.
    """
    if TEACHER_PROMPTS[0] not in batch.batch.keys():
        return batch
    require(batch, (*TEACHER_PROMPTS, "responses", "attention_mask"), "the prompts of the teacher")
    columns = batch.batch
    prompts, responses = columns["teacher_prompts"], columns["responses"]
    prompt_attention, response_attention = torch.tensor_split(columns["attention_mask"], [-responses.shape[1]], dim=1)
    input_ids = torch.cat([prompts, responses], dim=1)
    attention_mask = torch.cat([columns["teacher_prompts_mask"], response_attention], dim=1)
    names = [name for name in columns.keys() if name != "routed_experts" and name not in TEACHER_PROMPTS]
    tensors = {"prompts": prompts, "input_ids": input_ids, "attention_mask": attention_mask}
    images: dict[str, np.ndarray] = {}
    if vision is None or columns["position_ids"].dim() == 2:  # (bsz, 4, length) with images
        tensors["position_ids"] = compute_position_id_with_mask(attention_mask)
    else:
        longer = (columns["teacher_prompts_mask"].sum(-1) - prompt_attention.sum(-1)).tolist()
        images[IMAGES] = _moved(batch.non_tensor_batch[IMAGES], longer)
        tensors["position_ids"] = sequence_positions(
            input_ids, attention_mask, columns["response_mask"], images[IMAGES].tolist(), vision
        )
    return replace_columns(batch.select(batch_keys=names), DataProto.from_dict(tensors=tensors, non_tensors=images))


def _moved(inputs: np.ndarray, longer: list[int]) -> np.ndarray:
    """Move the places of drawn tokens with the id of images, all behind the context, by what it adds to each row."""
    rows = [
        SharedTensors({**row, TEXT_PLACES: row[TEXT_PLACES] + more}) if TEXT_PLACES in row and more else row
        for row, more in zip(inputs, longer, strict=True)
    ]
    return np.fromiter(rows, dtype=object, count=len(rows))
