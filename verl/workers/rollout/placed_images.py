"""Images of prompts as engines compute them: the places of their tokens, their positions, and what tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from verl.protocol.shared import SharedTensors
from verl.vision.families import IMAGE_INPUTS, SECONDS, VisionConfig
from verl.vision.model import ImageInputs
from verl.vision.positions import mrope_positions
from verl.workers.rollout.engine_side.verl_images import image_digest, modality_of
from verl.workers.rollout.request import RolloutRequest

T = TypeVar("T")


@dataclass(frozen=True)
class ImageSpan:
    """An image in a prompt."""

    places: Tensor
    """(tokens,) increasing places of its tokens."""
    digest: bytes
    """Hash of its pixels and its grid."""

    @property
    def start(self) -> int:
        """Place of its first token."""
        return int(self.places[0])

    @property
    def end(self) -> int:
        """Place after its last token."""
        return int(self.places[-1]) + 1


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """The images of a prompt, which has at least one."""

    tensors: SharedTensors
    """``pixel_values`` and ``image_grid_thw``."""
    spans: tuple[ImageSpan, ...]
    """Each image, in the order of the prompt."""
    positions: Tensor
    """(4, tokens) M-RoPE positions of the prompt."""

    @classmethod
    def from_request(cls, request: RolloutRequest, vision: VisionConfig | None) -> PlacedImages | None:
        """Place the images of a request; None if it has none.

        Raises:
            DataError: its image tokens are not those of its images.
        """
        if request.images is None or vision is None:
            return None
        ids = torch.tensor(request.prompt_ids)
        is_image = vision.marked(ids)
        is_image[request.places_of_text] = False
        grid = request.images[IMAGE_INPUTS[1]]
        positions = mrope_positions(ids, grid, vision, is_image, request.images.get(SECONDS))
        places = is_image.nonzero().flatten().split([vision.tokens_of(image) for image in grid])
        spans = zip(places, digests(request.images), strict=True)
        return cls(request.images, tuple(ImageSpan(*span) for span in spans), positions)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Hashes of all images."""
        return tuple(span.digest for span in self.spans)

    @property
    def offset(self) -> int:
        """Position of the next token minus the number of tokens; negative, as an image spans few positions."""
        return int(self.positions[1:].max()) + 1 - self.positions.shape[1]

    def by_modality(self, values: Sequence[T]) -> dict[str, list[T]]:
        """Sort one value for each image or video by what vLLM takes it for."""
        by_modality: dict[str, list[T]] = {}
        for grid, value in zip(self.tensors.arrays()[IMAGE_INPUTS[1]], values, strict=True):
            by_modality.setdefault(modality_of(grid), []).append(value)
        return by_modality

    def before(self, end: int) -> tuple[bytes, ...]:
        """Hashes of the images that begin before place ``end``."""
        return tuple(span.digest for span in self.spans if span.start < end)


_digests: WeakKeyDictionary[SharedTensors, tuple[bytes, ...]] = WeakKeyDictionary()
"""Hashes of the images of prompts in use: the responses to a prompt share its images."""


def digests(images: SharedTensors) -> tuple[bytes, ...]:
    """Return a hash of the pixels, the grid and the speed of each image or video."""
    hashes = _digests.get(images)
    if hashes is None:
        # The same frames at another speed have other positions.
        parts = (pixels_of_each(images), images.arrays()[IMAGE_INPUTS[1]], seconds_of_each(images))
        hashes = _digests[images] = tuple(map(image_digest, *parts))
    return hashes


def note_digests(images: SharedTensors, image_digests: tuple[bytes, ...]) -> None:
    """Note the hashes of images that were computed elsewhere, so that :func:`digests` need not."""
    _digests[images] = image_digests


def pixels_of_each(images: SharedTensors) -> list[np.ndarray]:
    """Return the pixels of each image, (patches, values of a patch), without a copy."""
    arrays = images.arrays()
    pixels, grid = (arrays[name] for name in IMAGE_INPUTS)
    return np.split(pixels, np.cumsum(grid.prod(-1))[:-1])


def seconds_of_each(images: SharedTensors) -> list[float | None]:
    """Return ``second_per_grid_ts`` of each image or video; None for all where the images have none."""
    arrays = images.arrays()
    return arrays[SECONDS].tolist() if SECONDS in arrays else [None] * len(arrays[IMAGE_INPUTS[1]])


def images_of_pass(
    prompts: Sequence[PlacedImages | None], starts: Sequence[int], lengths: Sequence[int]
) -> ImageInputs | None:
    """Join the images of a packed pass; None if no token of an image is in it.

    Args:
        prompts: the images of each prompt.
        starts: the place of each prompt's first token that is in the pass; those before are known.
        lengths: the number of tokens of each prompt.
    """
    size = sum(lengths) - sum(starts)
    places = torch.zeros(size, dtype=torch.bool)
    pixels: list[np.ndarray] = []
    grids: list[np.ndarray] = []
    in_pass: list[Tensor] = []
    first = 0
    for images, start, length in zip(prompts, starts, lengths, strict=True):
        if images is not None:
            images_in_order = zip(
                images.spans, pixels_of_each(images.tensors), images.tensors.arrays()[IMAGE_INPUTS[1]], strict=True
            )
            for span, values, grid in images_in_order:
                if span.end > start:
                    new = span.places >= start
                    places[first + span.places[new] - start] = True
                    pixels.append(values)
                    grids.append(grid)
                    in_pass.append(new)
        first += length - start
    if not pixels:
        return None
    new = torch.cat(in_pass)
    return ImageInputs(
        pixel_values=torch.from_numpy(np.concatenate(pixels)),
        image_grid_thw=torch.from_numpy(np.stack(grids)).to(torch.int64),
        places=places.unsqueeze(0),
        in_pass=None if bool(new.all()) else new,
    )
