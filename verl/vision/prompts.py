"""The images of a row as tokens of its prompt and as inputs of the model."""

from __future__ import annotations

from collections.abc import Sequence
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
