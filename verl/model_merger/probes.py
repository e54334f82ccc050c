"""Inputs on which the merger compares two models: text and, for a model with images, a picture between words."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.vision.families import VisionConfig
from verl.workers.forward_check import probe_sequences

_BEFORE, _AFTER = 3, 4  # tokens of text around the picture


def probes(config: PretrainedConfig) -> list[dict[str, Tensor]]:
    """Return arguments of the forward pass of models with this config, one sequence in each."""
    inputs = [{"input_ids": ids[None]} for ids in probe_sequences(config, (7, 4), torch.device("cpu"))]
    vision = VisionConfig.from_config(config)
    return inputs if vision is None else [*inputs, _picture(config, vision)]


def _picture(config: PretrainedConfig, vision: VisionConfig) -> dict[str, Tensor]:
    """Return a sequence with a picture of 2 x 3 tokens, whose patches all differ."""
    grid = torch.tensor([[1, 2 * vision.merge_size, 3 * vision.merge_size]])
    count = vision.tokens_of(grid)
    text = probe_sequences(config, (_BEFORE + _AFTER,), torch.device("cpu"))[0]
    text = text.masked_fill(vision.marked(text), 0)  # they would ask for another picture
    ids = torch.cat([text[:_BEFORE], torch.full((count,), vision.image_token_id), text[_BEFORE:]])
    patches = int(grid.prod())
    return {
        "input_ids": ids[None],
        "mm_token_type_ids": (ids == vision.image_token_id).long()[None],
        "pixel_values": torch.arange(patches * vision.patch_values).view(patches, -1).sin(),
        "image_grid_thw": grid,
    }
