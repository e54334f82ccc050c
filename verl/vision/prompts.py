"""The images of a row as tokens of its prompt and as inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from verl.errors import ConfigError, DataError
from verl.vision.families import FAMILIES, IMAGE_INPUTS, VisionConfig
from verl.vision.images import process_image
from verl.vision.positions import mrope_positions


class ImagePrompts:
    """Makes image tokens, positions and inputs of images by the processor of a model.

    Args:
        processor: of one of the families of :mod:`verl.vision.families`.
    """

    def __init__(self, processor: Any) -> None:
        self._images = processor.image_processor
        size = 3 * self._images.temporal_patch_size * self._images.patch_size**2
        self.config = VisionConfig(processor.image_token_id, self._images.merge_size, size)

    @classmethod
    def of(cls, processor: Any) -> ImagePrompts | None:
        """Return those of a processor; None for a text model.

        Raises:
            ConfigError: the processor is of another family.
        """
        if processor is None:
            return None
        name = type(processor).__name__
        if name not in FAMILIES.values():
            return None
        if not isinstance(processor.image_token_id, int):
            raise ConfigError(f"the tokenizer of this {name} has no image token. Take the model's own tokenizer.")
        return cls(processor)

    def read(self, image: Any, place: str) -> Image.Image:
        """Decode an image and bring it to the size that it asks for; see :func:`verl.vision.images.process_image`."""
        return process_image(image, self._images.patch_size, place)

    def count_tokens(self, image: Image.Image, place: str) -> int:
        """Return the number of tokens of an image.

        Raises:
            DataError: the image is too narrow; the message names ``place``.
        """
        try:
            patches = self._images.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise DataError(f"{place}: an image of {image.width} x {image.height} pixels: {error}.") from error
        return int(patches) // self.config.merge_size**2

    def inputs(self, images: Sequence[Image.Image], place: str) -> dict[str, Tensor]:
        """Return ``pixel_values`` and ``image_grid_thw`` of the images of a row; nothing without images."""
        if not images:
            return {}
        try:
            found = self._images(images=list(images), return_tensors="pt")
        except ValueError as error:
            raise DataError(f"{place}: the image processor refuses an image: {error}.") from error
        return {name: found[name] for name in IMAGE_INPUTS}

    def pictures(self, inputs: Mapping[str, Tensor]) -> list[Image.Image]:
        """Return the images that inputs of :meth:`inputs` were made of, in the size in which the policy sees them.

        The same inputs can be made of them again: edges are whole tokens already.
        """
        if not inputs:
            return []
        own = self._images
        size, merge, frames = own.patch_size, self.config.merge_size, own.temporal_patch_size
        pixels, grids = (inputs[name] for name in IMAGE_INPUTS)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in self._normalization())
        found = []
        parts = pixels.split([int(count) for count in grids.prod(-1)])
        for part, (_, rows, columns) in zip(parts, grids.tolist(), strict=True):
            blocks = part.view(rows // merge, columns // merge, merge, merge, 3, frames, size, size)[:, :, :, :, :, 0]
            image = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size)
            bytes_of = ((image * std + mean) / (own.rescale_factor if own.do_rescale else 1)).round().clamp(0, 255)
            found.append(Image.fromarray(bytes_of.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()))
        return found

    def _normalization(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of each colour, which the image processor takes out."""
        own = self._images
        return (own.image_mean, own.image_std) if own.do_normalize else ([0.0] * 3, [1.0] * 3)

    def repeats(self, ids: Sequence[int], counts: Sequence[int], place: str) -> list[int]:
        """Return how often each token of a rendered text stands in the model's input: ``counts[n]`` times, or once.

        Raises:
            DataError: there is another number of image tokens than of images; the message names ``place``.
        """
        found = list(ids).count(self.config.image_token_id)
        if found != len(counts):
            raise DataError(
                f"{place}: the text has {found} image token(s) after the chat template, and {len(counts)} image(s). "
                "Take the text of the image token out of the messages, or use a template that writes images."
            )
        remaining = iter(counts)
        return [next(remaining) if token == self.config.image_token_id else 1 for token in ids]

    def expanded(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Repeat the n-th image token of ``ids`` ``counts[n]`` times."""
        remaining = iter(counts)
        return [
            token
            for number in ids
            for token in ([number] * next(remaining) if number == self.config.image_token_id else [number])
        ]

    def positions(self, ids: Sequence[int], grid: Tensor | None) -> Tensor:
        """Return the position ids of a prompt, (4, tokens); see :func:`mrope_positions`."""
        return mrope_positions(torch.tensor(ids, dtype=torch.int64), grid, self.config)
