"""Images of requests on their way to engines in other processes: pixels go into Ray's object store once, by content.

::

    conversation ── turn 1: image a ─┐                      ┌─► engine: reads a
                 ── turn 2: a, b ────┴─► object store: a, b ┴─► engine: knows a, reads b
                                         requests: references

The process of the conversations owns the stored pixels, and frees them when no conversation of its has them any more.
The engine's side copies them, so that nothing there keeps the store's memory.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl.base.types import JsonObject
from verl.errors import RolloutError
from verl.protocol.shared import SharedTensors
from verl.protocol.stored import MIN_BYTES
from verl.vision.families import IMAGE_INPUTS, SECONDS
from verl.workers.rollout.placed_images import digests, note_digests, pixels_of_each, seconds_of_each
from verl.workers.rollout.request import RolloutRequest

RECENT_BYTES = 2**28
"""Bytes of pixels that the side of an engine keeps for later turns and other conversations."""


@dataclass(frozen=True)
class SentImage:
    """An image on its way."""

    digest: bytes
    """Hash of its pixels and its grid."""
    grid: np.ndarray
    """(3,) patches along time, height and width."""
    seconds: float | None
    """Seconds between two steps of a video; None if the images of the request are not in seconds."""
    pixels: Any
    """Reference to its pixels; of a small image the pixels, (patches, values of a patch)."""
    nbytes: int
    """Size of its pixels."""

    @property
    def is_stored(self) -> bool:
        """Return whether ``pixels`` is a reference."""
        return not isinstance(self.pixels, np.ndarray)


@dataclass(frozen=True)
class SentRequest(RolloutRequest):
    """A request whose images are in ``sent`` instead of ``images``."""

    sent: tuple[SentImage, ...] = ()


class ImageSender:
    """The images of the conversations of one process; all methods may be called from any thread.

    Args:
        put: stores an array and returns a reference to it, ``ray.put``.
    """

    def __init__(self, put: Callable[[np.ndarray], object]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._stored: dict[bytes, SentImage] = {}
        self._conversations: dict[str, set[bytes]] = {}
        """The stored images of each conversation."""
        self._users: Counter[bytes] = Counter()
        """Number of conversations with each stored image."""

    def sent(self, conversation: str, request: RolloutRequest) -> RolloutRequest:
        """Return a request that travels without the pixels of its images, which stay stored until :meth:`end`."""
        images = request.images
        if images is None:
            return request
        grids = images.arrays()[IMAGE_INPUTS[1]]
        parts = zip(digests(images), grids, seconds_of_each(images), pixels_of_each(images), strict=True)
        with self._lock:
            sent = tuple(self._sent(conversation, *part) for part in parts)
        return SentRequest(**_fields(request, images=None), sent=sent)

    def _sent(
        self, conversation: str, digest: bytes, grid: np.ndarray, seconds: float | None, pixels: np.ndarray
    ) -> SentImage:
        if pixels.nbytes < MIN_BYTES:
            return SentImage(digest, grid, seconds, pixels, pixels.nbytes)
        if digest not in self._stored:
            self._stored[digest] = SentImage(digest, grid, seconds, self._put(pixels), pixels.nbytes)
        sent_digests = self._conversations.setdefault(conversation, set())
        if digest not in sent_digests:
            sent_digests.add(digest)
            self._users[digest] += 1
        # An image alone has no seconds, and 0 once a later turn shows a video beside it.
        return replace(self._stored[digest], seconds=seconds)

    def end(self, conversation: str) -> None:
        """Free what only this conversation had. Idempotent."""
        with self._lock:
            for digest in self._conversations.pop(conversation, ()):
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest], self._stored[digest]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all pixels that are stored now."""
        with self._lock:
            return sum(image.nbytes for image in self._stored.values())


class ImageReceiver:
    """Recent images on the side of an engine, for one thread.

    Args:
        get: returns the array of a reference, or raises LookupError with the reason why it is lost.
        room: most bytes that are kept; those that were not used for the longest time go first.
    """

    def __init__(self, get: Callable[[Any], np.ndarray], room: int = RECENT_BYTES) -> None:
        self._get = get
        self._room = room
        self._recent: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self.kept_bytes = 0
        """Bytes of all pixels that are kept now."""

    def opened(self, request: RolloutRequest) -> RolloutRequest:
        """Return a request with its images.

        Raises:
            RolloutError: the pixels of an image are lost.
        """
        if not isinstance(request, SentRequest):
            return request
        pixels = [self._pixels(index, image) for index, image in enumerate(request.sent)]
        joined = pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
        grid = np.stack([image.grid for image in request.sent])
        tensors: dict[str, torch.Tensor] = dict(zip(IMAGE_INPUTS, map(torch.from_numpy, (joined, grid)), strict=True))
        if request.sent[0].seconds is not None:
            tensors[SECONDS] = torch.tensor([image.seconds for image in request.sent], dtype=torch.float32)
        images = SharedTensors(tensors)
        note_digests(images, tuple(image.digest for image in request.sent))
        return RolloutRequest(**_fields(request, images=images))

    def _pixels(self, index: int, image: SentImage) -> np.ndarray:
        if not image.is_stored:
            return image.pixels.copy()  # it lies in memory of the message, which cannot be written to
        pixels = self._recent.pop(image.digest, None)
        if pixels is None:
            try:
                pixels = np.array(self._get(image.pixels))
            except LookupError as error:
                raise RolloutError(
                    f"image {index} of the prompt is lost: the process that held the conversation, or its machine, "
                    f"has ended ({error})."
                ) from error
            self.kept_bytes += image.nbytes
        self._recent[image.digest] = pixels
        while self.kept_bytes > self._room:
            self.kept_bytes -= self._recent.popitem(last=False)[1].nbytes
        return pixels


def _fields(request: RolloutRequest, **changes: object) -> JsonObject:
    return {name: getattr(request, name) for name in RolloutRequest.__dataclass_fields__} | changes
