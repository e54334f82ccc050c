"""The families of vision-language models that are trained here, and what is to be known of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, torch

FAMILIES: Mapping[str, str] = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}
"""``model_type`` of a Transformers config, and the class of the model's processor."""

IMAGE_TOKEN = "<|image_pad|>"
"""Text of the token whose embedding is replaced by a feature of an image, in the tokenizers of all families."""

VIDEO_TOKEN = "<|video_pad|>"
"""The same for videos."""

TIMESTAMPED = ("Qwen3VLProcessor",)
"""Processors whose videos are pictures with their times as text between them; other videos stand in one piece."""

IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
"""Inputs made of a row's images and videos, in the order of the prompt: (patches, values of a patch), and (images, 3),
the numbers of patches of each along time, height and width. An image has one step of time. A video has one for each two
frames, or is that many images with one step each (:data:`TIMESTAMPED`)."""

SECONDS = "second_per_grid_ts"
"""Further input of rows with videos of Qwen2.5-VL, (images,) float32: seconds between two steps of time; 0 for an
image."""

TEXT_PLACES = "text_places"
"""Optional further input, (k,): positions, counted without padding, of tokens that have the id of images and stand for
none, because the policy drew them in this sequence or in an earlier one that it goes on from."""

TOWER = "visual"
"""Attribute of the backbone that is the vision tower, with the projector to the language model in it."""


@dataclass(frozen=True)
class VisionConfig:
    """Fields of a vision-language model's config that the computation reads."""

    image_token_id: int
    """Token whose embedding is replaced by a feature of an image."""
    video_token_id: int
    """The same for a video."""
    merge_size: int
    """Patches along height and along width that become one token together."""
    patch_values: int
    """Numbers of a patch: channels x frames x height x width."""
    positions_per_second: float | None = None
    """Positions that a second of a video takes along time; None: a step of time takes one, however long it is."""

    @classmethod
    def from_config(cls, config: Any) -> VisionConfig | None:
        """Read the Transformers config of a model; None if it is of no family with images."""
        if getattr(config, "model_type", None) not in FAMILIES:
            return None
        vision = config.vision_config
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            merge_size=vision.spatial_merge_size,
            patch_values=size,
            positions_per_second=getattr(vision, "tokens_per_second", None),
        )

    @property
    def token_ids(self) -> tuple[int, int]:
        """Both tokens that stand for pictures."""
        return self.image_token_id, self.video_token_id

    def marked(self, ids: Tensor) -> Tensor:
        """Return which tokens have the id of images or of videos, bool of the shape of ``ids``."""
        return (ids == self.image_token_id) | (ids == self.video_token_id)

    def tokens_of(self, grid: torch.Tensor) -> int:
        """Image tokens of all images of a grid, (images, 3)."""
        return int(grid.prod(-1).sum()) // self.merge_size**2
