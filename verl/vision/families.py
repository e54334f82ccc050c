"""The families of vision-language models that are trained here, and what is to be known of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES: Mapping[str, str] = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
"""``model_type`` of a Transformers config, and the class of the model's processor."""

IMAGE_TOKEN = "<|image_pad|>"
"""Text of the token whose embedding is replaced by a feature of an image, in the tokenizers of all families."""

IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
"""What the image processor makes of a row's images: (patches, values of a patch), and (images, 3), the numbers of
patches of each image along time, height and width."""

TEXT_PLACES = "text_places"
"""What may stand beside them, (k,): places, counted without padding, of tokens with the id of images that stand for
none, because the policy drew them in this sequence or in an earlier one that it goes on from."""

TOWER = "visual"
"""Attribute of the backbone that is the vision tower, with the projector to the language model in it."""


@dataclass(frozen=True)
class VisionConfig:
    """What the computation needs of a vision-language model's config."""

    image_token_id: int
    """Token whose embedding is replaced by a feature of an image."""
    merge_size: int
    """Patches along height and along width that become one token together."""
    patch_values: int
    """Numbers of a patch: channels x frames x height x width."""

    @classmethod
    def of(cls, config: Any) -> VisionConfig | None:
        """Read the Transformers config of a model; None if it is of no family with images."""
        if getattr(config, "model_type", None) not in FAMILIES:
            return None
        vision = config.vision_config
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(config.image_token_id, vision.spatial_merge_size, size)

    def tokens_of(self, grid: Any) -> int:
        """Image tokens of all images of a grid, (images, 3)."""
        return int(grid.prod(-1).sum()) // self.merge_size**2
