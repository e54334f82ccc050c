"""Images of requests to a server on this machine, in files in shared memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from verl.vision.families import IMAGE_INPUTS, SECONDS
from verl.workers.rollout.placed_images import PlacedImages, pixels_of_each, seconds_of_each
from verl.workers.rollout.weights import save_tensors


class ImageFiles:
    """A file for each image of the requests under way, which requests with the same image share.

    All calls must come from one thread.

    Args:
        folders: each file is written to the first folder with enough free space.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._users: Counter[bytes] = Counter()
        """Number of requests with each image, by the hash of its content."""
        self._paths: dict[bytes, Path] = {}

    @contextlib.contextmanager
    def provide(self, images: PlacedImages) -> Iterator[list[str]]:
        """Yield ``index:path`` of each image of a request; the files exist inside the context.

        Raises:
            RolloutError: no folder has enough free space.
        """
        held: list[bytes] = []
        tensors = images.tensors
        grids = tensors.arrays()[IMAGE_INPUTS[1]]
        parts = zip(images.digests, pixels_of_each(tensors), grids, seconds_of_each(tensors), strict=True)
        try:
            for digest, pixels, grid, seconds in parts:
                if digest not in self._paths:
                    self._paths[digest] = self._written(digest, pixels, grid, seconds)
                self._users[digest] += 1
                held.append(digest)
            yield [f"{image_index}:{self._paths[digest]}" for image_index, digest in enumerate(held)]
        finally:
            for digest in held:
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
                    self._paths.pop(digest).unlink(missing_ok=True)

    def _written(self, digest: bytes, pixels: np.ndarray, grid: np.ndarray, seconds: float | None) -> Path:
        inputs = zip(IMAGE_INPUTS, (torch.from_numpy(pixels), torch.from_numpy(grid.copy())), strict=True)
        tensors: dict[str, torch.Tensor] = dict(inputs)
        tensors |= {} if seconds is None else {SECONDS: torch.tensor([seconds], dtype=torch.float32)}
        return save_tensors(tensors, self._folders, f"{digest.hex()}.safetensors", "images")
