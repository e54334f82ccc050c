"""The images of a batch as inputs of a pass: which tokens stand for them, and their pixels, joined over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.protocol.shared import joined
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.vision.model import ImageInputs

COLUMN = "multi_modal_inputs"


def has_images(batch: DataProto) -> bool:
    """Whether a row of a batch has an image."""
    return any(IMAGE_INPUTS[0] in row for row in batch.non_tensor_batch.get(COLUMN, ()))


def image_places(batch: DataProto, vision: VisionConfig) -> Tensor:
    """Return which tokens stand for images, (bsz, length) bool: those with the image's id that the policy did not draw.

    Raises:
        SchemaError: position ids lack their axes, or the image tokens of a row are not those of its images.
    """
    columns = batch.batch
    ids, response = columns["input_ids"], columns["response_mask"]
    if columns["position_ids"].dim() != 3 and has_images(batch):
        raise SchemaError(
            f"position_ids has shape {tuple(columns['position_ids'].shape)}, and rows with images need (bsz, 4, "
            "length): verl.vision.positions makes them. RLHFDataset does so if it is given the model's processor."
        )
    places = (ids == vision.image_token_id) & columns["attention_mask"].bool()
    places[:, ids.shape[1] - response.shape[1] :] &= response == 0
    rows = batch.non_tensor_batch.get(COLUMN)
    for number, found in enumerate(places.sum(-1).tolist()):
        grid = None if rows is None else rows[number].get(IMAGE_INPUTS[1])
        wanted = 0 if grid is None else vision.tokens_of(grid)
        if found != wanted:
            raise SchemaError(
                f"row {number} of the batch has {found} image tokens, and the images in its {COLUMN} make {wanted}. "
                "Prompts with images are not cut, and both come from one data set."
            )
    return places


def images_of(batch: DataProto, places: Tensor) -> ImageInputs | None:
    """Join the images of all rows; None if there are none. ``places`` are those of their tokens in the pass."""
    rows = batch.non_tensor_batch.get(COLUMN)
    if rows is None or not has_images(batch):
        return None
    pixels, grid = (joined(list(rows), name) for name in IMAGE_INPUTS)
    assert pixels is not None
    assert grid is not None
    return ImageInputs(pixel_values=pixels, image_grid_thw=grid.to(torch.int64), places=places)
