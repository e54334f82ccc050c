"""The forward pass of a vision-language model's backbone with images, also where a rank has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.base.device_copies import to_device
from verl.base.types import JsonMapping
from verl.vision.families import TOWER, VisionConfig


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Images of a pass and the places of their tokens."""

    pixel_values: Tensor
    """(patches, values of a patch)."""
    image_grid_thw: Tensor
    """(images, 3)."""
    places: Tensor
    """Bool of the shape of ``input_ids``: True on the tokens of the images, in their order."""
    in_pass: Tensor | None = None
    """(tokens of all images,) bool, which of them have places; None: all. Others are known from an earlier pass."""
    is_filler: bool = False
    """The pass has no images: the tower runs because other ranks need it for theirs, and its result is not used."""

    @classmethod
    def filler(cls, config: VisionConfig, input_ids: Tensor) -> ImageInputs:
        """The smallest image, for a pass without images."""
        size = config.merge_size
        return cls(
            pixel_values=torch.zeros(size**2, config.patch_values),
            image_grid_thw=torch.tensor([[1, size, size]]),
            places=torch.zeros_like(input_ids, dtype=torch.bool),
            is_filler=True,
        )

    def to(self, device: torch.device) -> ImageInputs:
        """Move all tensors to ``device``."""
        moved = {name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def hidden_states(backbone: Any, arguments: JsonMapping, images: ImageInputs) -> Tensor:
    """Compute the last hidden states of a backbone of one of our families, with images in place of their tokens.

    It does what the backbone's own forward pass does with ``pixel_values``, except that the places of images are given:
    a token with the id of images that the policy drew is text.

    Args:
        backbone: the Transformers model without its head, which has a vision tower and ``language_model``.
        arguments: those of the backbone's forward pass, with ``input_ids``.
        images: their pixels and places.
    """
    rest = dict(arguments)
    embeddings = backbone.get_input_embeddings()(rest.pop("input_ids"))
    features, *layers = image_features(getattr(backbone, TOWER), images)
    if images.is_filler:
        # Zero times the features keeps their backward pass, in whose collectives other ranks wait.
        embeddings = embeddings + 0.0 * torch.stack([part.sum() for part in (features, *layers)]).sum()
    else:
        embeddings = embeddings.masked_scatter(images.places.unsqueeze(-1), features.to(embeddings.dtype))
        if layers:
            rest |= {"visual_pos_masks": images.places, "deepstack_visual_embeds": layers}
    return backbone.language_model(inputs_embeds=embeddings, **rest).last_hidden_state


def image_features(tower: Any, images: ImageInputs) -> list[Tensor]:
    """Compute what a vision tower makes of images, of each (image tokens of the pass, hidden).

    The first replaces the embeddings of the images' tokens. Qwen3-VL has more, of several depths, one for each of the
    first layers of the language model, to whose output it is added (DeepStack, arXiv:2406.04334).
    """
    output = tower(images.pixel_values.type(tower.dtype), grid_thw=images.image_grid_thw, return_dict=True)
    features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return features if images.in_pass is None else [part[images.in_pass] for part in features]
