"""The images of the rows of a data set of prompts: placed in the messages, read, measured, made inputs of the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from verl.errors import DataError
from verl.utils.dataset.chat import Message, as_messages
from verl.utils.dataset.files import DataFile, refuse_media
from verl.vision.messages import with_image_parts, with_placeholders
from verl.vision.prompts import ImagePrompts

logger = logging.getLogger(__name__)

SHOWN = 5
_READ_AT_ONCE = 256


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt and the images of its row, as the row has them."""

    plain: list[Message]
    """Its messages with texts alone, in which ``<image>`` stands for images."""
    messages: list[Message]
    """Its messages as the chat template takes them."""
    images: list[Any]


@dataclass(frozen=True)
class RowImages:
    """The images of a row, measured."""

    tokens: list[int]
    """Tokens of each."""
    digest: str
    """Hash of what the row has for them; empty without images."""


class PromptImages:
    """Reads prompts with their images.

    Args:
        processor: the model's, or None.
        image_key: column of images.
        video_key: column of videos.
    """

    def __init__(self, processor: Any, image_key: str, video_key: str) -> None:
        self.maker = ImagePrompts.of(processor)
        self.image_key, self.video_key = image_key, video_key
        self.broken: list[str] = []
        """What is wrong with each row that was left out."""
        self._tokens: dict[Any, list[int]] = {}
        """Tokens of each image of the rows with images, by the row's number."""
        self._reader = type(processor).__name__ if processor is not None else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of images, videos and sounds."""
        return (self.image_key, self.video_key, "audios")

    def refuse_media(self, file: DataFile) -> None:
        """Raise DataError, with file and row, if a file has media that the model or this version cannot take."""
        for key in self.keys:
            if key != self.image_key or self.maker is None:
                refuse_media([file], [key], self._why_not(key))

    def _why_not(self, key: str) -> str:
        if key != self.image_key:
            return "Rows have texts and images in this version: videos and sounds are not read."
        if self._reader is None:
            return "No image processor was given: the model is one for text, or this command reads texts alone."
        return f"Images are for models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL; this one's processor is {self._reader}."

    def prompt(self, prompt: Any, images: Any, place: str) -> ImagePrompt:
        """Check the messages of a row and place its images in them.

        Raises:
            DataError: see :mod:`verl.vision.messages`.
        """
        if self.maker is None:
            plain = as_messages(prompt, place)
            return ImagePrompt(plain, plain, [])
        prompt, found = with_placeholders(prompt, images, place)
        plain = as_messages(prompt, place)
        return ImagePrompt(plain, with_image_parts(plain, len(found), place), found)

    def read(self, prompt: ImagePrompt, place: str) -> tuple[list[Image.Image], list[int]]:
        """Decode the images of a prompt; return them and their numbers of tokens.

        Raises:
            DataError: an image cannot be read or is too narrow.
        """
        if self.maker is None or not prompt.images:
            return [], []
        images = [self.maker.read(image, place) for image in prompt.images]
        return images, [self.maker.count_tokens(image, place) for image in images]

    def measured(
        self, prompts: Iterable[tuple[Any, str, ImagePrompt]], workers: int
    ) -> Iterator[tuple[Any, ImagePrompt, int]]:
        """Decode all images once, and leave out rows with broken ones, which are named in one warning.

        Args:
            prompts: number, place and prompt of each row.
            workers: threads that decode.

        Yields:
            number and prompt of each row that is left, and the tokens that its images add to its placeholders.
        """
        broken: list[str] = []
        total = 0

        def counted(item: tuple[Any, str, ImagePrompt]) -> list[int] | DataError:
            try:
                return self.read(item[2], item[1])[1]
            except DataError as error:
                return error

        with ThreadPoolExecutor(workers) as pool:
            for part in _parts(prompts):
                total += len(part)
                for (number, _, prompt), found in zip(part, pool.map(counted, part), strict=True):
                    if isinstance(found, DataError):
                        broken.append(str(found))
                    else:
                        if found:
                            self._tokens[number] = found
                        yield number, prompt, sum(found) - len(found)
        self.broken += broken
        if broken:
            more = f" ... and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
            told = f"{len(broken)} of {total} rows have images that cannot be used: {' | '.join(broken[:SHOWN])}{more}"
            if len(broken) == total:
                raise DataError(told)
            logger.warning("left out: %s", told)

    def of_row(self, number: Any, prompt: ImagePrompt) -> RowImages:
        """Return what :meth:`measured` found of a row."""
        digest = hashlib.blake2b(repr(prompt.images).encode(), digest_size=16).hexdigest() if prompt.images else ""
        return RowImages(self._tokens.get(number, []), digest)

    def expanded(self, ids: list[int], mask: list[int], counts: list[int], place: str) -> tuple[list[int], list[int]]:
        """Repeat the n-th image token, and its place in the loss mask, ``counts[n]`` times.

        Raises:
            DataError: there is another number of image tokens than of images.
        """
        if self.maker is None or not counts:
            return ids, mask
        pairs = zip(ids, mask, self.maker.repeats(ids, counts, place), strict=True)
        long = [(token, trained) for token, trained, count in pairs for _ in range(count)]
        return [token for token, _ in long], [trained for _, trained in long]

    def columns(self, images: list[Image.Image], ids: list[int], place: str) -> Mapping[str, Any]:
        """Return the inputs of the images by name, and under ``positions`` the position ids, (4, tokens)."""
        assert self.maker is not None
        inputs = self.maker.inputs(images, place)
        return inputs | {"positions": self.maker.positions(ids, inputs.get("image_grid_thw"))}


def _parts(items: Iterable[Any]) -> Iterator[list[Any]]:
    part: list[Any] = []
    for item in items:
        part.append(item)
        if len(part) == _READ_AT_ONCE:
            yield part
            part = []
    if part:
        yield part
