"""Positions of tokens in prompts with images and videos: M-RoPE (arXiv:2409.12191).

A text token has one position on all axes. The tokens of an image or a video, T x H x W of them, have the position
before which it stands plus their place along time, height and width; the token after it goes on from the largest of
them. For Qwen2.5-VL (arXiv:2502.13923) the place along time is in seconds, times ``positions_per_second``, rounded
down. Position ids have four axes: the number of the token, then time, height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.errors import DataError
from verl.vision.families import IMAGE_INPUTS, SECONDS, TEXT_PLACES, VisionConfig

AXES = 4
"""Number of position axes: that of text, and time, height and width of images."""


def mrope_positions(
    input_ids: Tensor,
    grid: Tensor | None,
    config: VisionConfig,
    is_image: Tensor | None = None,
    seconds: Tensor | None = None,
) -> Tensor:
    """Return the positions of a sequence without padding, (4, tokens) int64.

    Args:
        input_ids: (tokens,) with all image tokens.
        grid: (images, 3) patches along time, height and width, ``image_grid_thw``; None if there are no images.
        config: of the model.
        is_image: (tokens,) bool, which tokens stand for the images, in turn; None: all with the ids of images and
            videos.
        seconds: (images,) between two steps of time, ``second_per_grid_ts``; None: each is one second.

    Raises:
        DataError: the image tokens are not those of the images.
    """
    if is_image is None:
        is_image = config.marked(input_ids)
    grids = [] if grid is None else grid.tolist()
    expected = 0 if grid is None else config.tokens_of(grid)
    if int(is_image.sum()) != expected:
        raise DataError(
            f"a sequence has {int(is_image.sum())} image tokens, and its {len(grids)} images make {expected}."
        )
    steps = torch.ones(len(input_ids) + 1, dtype=torch.int64)
    offsets = torch.zeros(AXES - 1, len(input_ids), dtype=torch.int64)  # from the position before the image
    places = is_image.nonzero().flatten()
    for image_index, (frames, height, width) in enumerate(grids):
        rows, columns = height // config.merge_size, width // config.merge_size
        image_places, places = places[: frames * rows * columns], places[frames * rows * columns :]
        times = torch.arange(frames)
        if config.positions_per_second is not None:
            interval = 1.0 if seconds is None else seconds[image_index]
            times = (times * (config.positions_per_second * interval)).long()
        time, row, column = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        offsets[:, image_places] = torch.stack([time.flatten(), row.flatten(), column.flatten()])
        steps[image_places + 1] = 0  # the tokens of an image start at one position
        steps[image_places[-1] + 1] = max(rows, columns, int(times[-1]) + 1)
    starts = steps[:-1].cumsum(0) - 1
    return torch.cat([torch.arange(len(input_ids)).unsqueeze(0), starts + offsets])


def image_tokens(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    rows: Sequence[Mapping[str, Tensor]],
    config: VisionConfig,
) -> Tensor:
    """Return which tokens stand for images or videos, (bsz, length) bool: those with their ids that were not drawn.

    The policy drew response tokens with mask 1, and those that a row names in ``text_places``. Where the other tokens
    in a prompt are all that its images make, the response is text: the mask may be 0 on tokens that the policy drew,
    because they are context of a later turn or are not trained on.

    Args:
        input_ids: (bsz, length).
        attention_mask: (bsz, length), 1 on tokens.
        response_mask: (bsz, response_length), 1 on tokens that the policy drew.
        rows: ``multi_modal_inputs`` of each row; empty if they are not known.
        config: of the model.
    """
    there = attention_mask.bool()
    is_image = config.marked(input_ids) & there
    first = input_ids.shape[1] - response_mask.shape[1]
    is_image[:, first:] &= response_mask == 0
    for row, inputs in enumerate(rows):
        if TEXT_PLACES in inputs:
            is_image[row, there[row].nonzero().flatten()[inputs[TEXT_PLACES]]] = False
    in_prompt = is_image[:, :first].sum(-1).tolist()
    for row, inputs in enumerate(rows):
        if in_prompt[row] == tokens_of_row(inputs, config):
            is_image[row, first:] = False
    return is_image


def tokens_of_row(inputs: Mapping[str, Tensor], config: VisionConfig) -> int:
    """Return the number of tokens that the images of a row make."""
    grid = inputs.get(IMAGE_INPUTS[1])
    return 0 if grid is None else config.tokens_of(grid)


def left_padded(positions: Tensor, length: int) -> Tensor:
    """Pad positions, (4, tokens), with zeros on the left to (4, length); or what else has tokens last."""
    return torch.nn.functional.pad(positions, (length - positions.shape[-1], 0))


def sequence_positions(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    images: Sequence[Mapping[str, Tensor]],
    config: VisionConfig,
) -> Tensor:
    """Return the positions of padded sequences with images in prompts and responses.

    Args:
        input_ids: (bsz, prompt_length + response_length), prompts padded on the left, responses on the right.
        attention_mask: the same shape, 1 on tokens.
        response_mask: (bsz, response_length) 1 on tokens that the policy drew, which stand for no image.
        images: ``multi_modal_inputs`` of each row, which name other tokens that stand for none; empty without images.
        config: of the model.

    Returns:
        (bsz, 4, prompt_length + response_length): zeros on the left, and on the right the largest position before.

    Raises:
        DataError: the image tokens are not those of the images.
    """
    mask = attention_mask.bool()
    is_image = image_tokens(input_ids, attention_mask, response_mask, images, config)
    width = input_ids.shape[1] - response_mask.shape[1]
    positions = torch.zeros(len(input_ids), AXES, input_ids.shape[1], dtype=torch.int64)
    for row, inputs in enumerate(images):
        there = mask[row]
        row_positions = mrope_positions(
            input_ids[row][there], inputs.get(IMAGE_INPUTS[1]), config, is_image[row][there], inputs.get(SECONDS)
        )
        positions[row][:, there] = row_positions
        last = torch.stack([row_positions[0].amax(), *[row_positions[1:].amax()] * 3])
        positions[row][:, width:][:, ~there[width:]] = last.unsqueeze(-1)
    return positions
