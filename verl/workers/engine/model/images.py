"""The images of a batch as inputs of a pass: which tokens stand for them, and their pixels, joined over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.protocol.shared import joined
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.vision.model import ImageInputs
from verl.vision.positions import image_tokens, tokens_of_row

COLUMN = "multi_modal_inputs"


def has_images(batch: DataProto) -> bool:
    """Return whether any row of a batch has an image."""
    return any(IMAGE_INPUTS[0] in row for row in batch.non_tensor_batch.get(COLUMN, ()))


def image_places(batch: DataProto, vision: VisionConfig) -> Tensor:
    """Return which tokens stand for images, (bsz, length) bool; see :func:`verl.vision.positions.image_tokens`.

    Raises:
        SchemaError: position ids lack their axes, or the image tokens of a row are not those of its images.
    """
    columns = batch.batch
    if columns["position_ids"].dim() != 3 and has_images(batch):
        raise SchemaError(
            f"position_ids has shape {tuple(columns['position_ids'].shape)}, but rows with images need (bsz, 4, "
            "length), as verl.vision.positions computes them. RLHFDataset does so if it receives the model's "
            "processor."
        )
    rows = batch.non_tensor_batch.get(COLUMN)
    # Without the column no response is taken for text: it would hide that the images were lost.
    inputs: Sequence[Mapping[str, Tensor]] = () if rows is None else list(rows)
    places = image_tokens(columns["input_ids"], columns["attention_mask"], columns["response_mask"], inputs, vision)
    for row_index, placeholders in enumerate(places.sum(-1).tolist()):
        expected = tokens_of_row(inputs[row_index], vision) if inputs else 0
        if placeholders != expected:
            raise SchemaError(
                f"row {row_index} of the batch has {placeholders} image tokens, and the images in its {COLUMN} make "
                f"{expected}. Prompts with images are not cut, and both come from one data set."
            )
    return places


def images_of(batch: DataProto, places: Tensor) -> ImageInputs | None:
    """Join the images of all rows; None if there are none. ``places`` marks their tokens in the pass."""
    rows = batch.non_tensor_batch.get(COLUMN)
    if rows is None or not has_images(batch):
        return None
    pixels, grid = (joined(list(rows), name) for name in IMAGE_INPUTS)
    assert pixels is not None
    assert grid is not None
    return ImageInputs(pixel_values=pixels, image_grid_thw=grid.to(torch.int64), places=places)
