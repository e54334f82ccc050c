"""Rows as a teacher reads them: the same responses, under a prompt of the teacher's own where the batch has one."""

from __future__ import annotations

import torch

from verl.protocol import DataProto, replace_columns
from verl.schema import require
from verl.utils.model import compute_position_id_with_mask

TEACHER_PROMPTS = ("teacher_prompts", "teacher_prompts_mask")
"""Columns of the prompts that a teacher reads instead of the policy's."""


def rows_for_teacher(batch: DataProto) -> DataProto:
    """Replace the prompts of a batch by ``teacher_prompts``; the batch itself without that column.

    Columns of whole sequences that belong to the policy's prompts, such as ``routed_experts``, are left out.
    """
    if TEACHER_PROMPTS[0] not in batch.batch.keys():
        return batch
    require(batch, (*TEACHER_PROMPTS, "responses", "attention_mask"), "the prompts of the teacher")
    columns = batch.batch
    prompts, responses = columns["teacher_prompts"], columns["responses"]
    of_responses = columns["attention_mask"][:, -responses.shape[1] :]
    attention_mask = torch.cat([columns["teacher_prompts_mask"], of_responses], dim=1)
    kept = [name for name in columns.keys() if name != "routed_experts" and name not in TEACHER_PROMPTS]
    made = {
        "prompts": prompts,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
    }
    return replace_columns(batch.select(batch_keys=kept), DataProto.from_dict(tensors=made))
