"""The columns of training sequences, by hand."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto
from verl.vision.families import VisionConfig
from verl.workers.rollout.columns import ResponseRow, padded_prompts, sequence_columns, with_weight_versions

IMAGE = 90
VISION = VisionConfig(image_token_id=IMAGE, video_token_id=91, merge_size=2, patch_values=12)


def test_columns_of_a_conversation_by_hand():
    prompts = padded_prompts([[5], [6, 7]], 2, pad_token_id=1)
    experts = torch.tensor([[[3]], [[4]]], dtype=torch.uint8)  # of the prompt's token and the first of the response
    rows = [
        ResponseRow([8, 9, 10], [-0.5, 0.0, -2.0], experts, [1, 0, 1], [4, -1, 6]),
        ResponseRow([11], [], None, [1]),  # an agent loop that gave no log-probs
    ]
    columns = {name: column.tolist() for name, column in sequence_columns(prompts, rows, 4, 1).items()}
    routing = columns.pop("routed_experts")
    assert columns == {
        "prompts": [[1, 5], [6, 7]],
        "responses": [[8, 9, 10, 1], [11, 1, 1, 1]],
        "input_ids": [[1, 5, 8, 9, 10, 1], [6, 7, 11, 1, 1, 1]],
        "attention_mask": [[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 3], [0, 1, 2, 2, 2, 2]],
        "response_mask": [[1, 0, 1, 0], [1, 0, 0, 0]],
        "rollout_log_probs": [[-0.5, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        "weight_versions": [[4, -1, 6, -1], [-1, -1, -1, -1]],
    }
    # 255 says that the experts are unknown.
    assert torch.tensor(routing).flatten(1).tolist() == [[255, 3, 4, 255, 255, 255], [255] * 6]


def test_without_masks_the_policy_drew_every_token():
    prompts = padded_prompts([[5]], 1, pad_token_id=1)
    columns = sequence_columns(prompts, [ResponseRow([8, 9], [-0.5, -1.0])], 3, 1)
    assert columns["response_mask"].tolist() == [[1, 1, 0]]
    assert columns["prompts"] is prompts[0]
    assert "routed_experts" not in columns


def test_an_image_that_a_tool_shows_has_positions_in_the_response():
    """A 4 x 4 grid of patches merged by 2 is 4 tokens, 2 x 2 places from position 2 on; the next text stands at 4."""
    prompts = padded_prompts([[5]], 1, pad_token_id=1)
    row = ResponseRow([8, IMAGE, IMAGE, IMAGE, IMAGE, 9], [0.0] * 6, None, [1, 0, 0, 0, 0, 1])
    images = [{"image_grid_thw": torch.tensor([[1, 4, 4]])}]
    positions = sequence_columns(prompts, [row], 7, 1, (images, VISION))["position_ids"]
    assert positions[0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 6],
        [0, 1, 2, 2, 2, 2, 4, 4],
        [0, 1, 2, 2, 3, 3, 4, 4],
        [0, 1, 2, 3, 2, 3, 4, 4],
    ]


def test_a_batch_that_was_stored_without_versions_has_those_of_its_rows():
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    versions = {"weight_version": np.array([3, 5], dtype=object)}
    batch = DataProto.from_dict({"response_mask": mask}, versions)
    column = with_weight_versions(batch).batch["weight_versions"]
    assert (column.tolist(), column.dtype) == ([[3, -1, 3], [5, 5, -1]], torch.int32)
    assert with_weight_versions(whole := with_weight_versions(batch)) is whole
