"""Images and videos of the rows of a data set: placed in the messages, read, measured, made inputs of the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from verl.datasets.chat import Message
from verl.datasets.files import DataFile, refuse_media
from verl.datasets.row_conversation import row_messages
from verl.errors import DataError
from verl.vision.messages import PLACEHOLDERS, in_order, with_image_parts, with_placeholders, with_times
from verl.vision.prompts import ImagePrompts, Picture
from verl.vision.videos import Clip, Video

if TYPE_CHECKING:
    import torch
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)

T = TypeVar("T")
RowId = TypeVar("RowId")

Media = dict[str, list[object]]
"""Under ``image`` the images of a row, under ``video`` its videos."""

SHOWN = 5  # broken rows in one message
_READ_AT_ONCE = 256  # rows; bounds the memory of decoded images


def _has_placeholder(messages: Iterable[Message]) -> bool:
    texts = [message["content"] or "" for message in messages]
    return any(mark in text for text in texts for mark in PLACEHOLDERS.values())


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt and the images and videos of its row."""

    plain: list[Message]
    """Its messages with texts alone, in which ``<image>`` and ``<video>`` stand for them."""
    messages: list[Message]
    """Its messages as the chat template takes them."""
    images: list[object]
    """Images and videos as the row has them, in the order of the messages; of an opened prompt videos are clips."""


@dataclass(frozen=True)
class RowImages:
    """The images and videos of a row, measured."""

    tokens: list[int]
    """Tokens at each of their places in the prompt."""
    digest: str
    """Hash of what the row has for them; empty without images."""


class PromptImages:
    """Reads prompts with their images.

    Args:
        processor: the model's, or None.
        image_key: column of images.
        video_key: column of videos.
    """

    def __init__(self, processor: ProcessorMixin | None, image_key: str, video_key: str) -> None:
        self.maker = ImagePrompts.from_processor(processor)
        self._kinds = {image_key: "image", video_key: "video"}
        self.image_key, self.video_key = image_key, video_key
        self.broken: list[str] = []
        """Fault of each row that was left out."""
        self._tokens: dict[object, list[int]] = {}
        """Tokens of each image of the rows with images, by the row's number."""
        self._reader = type(processor).__name__ if processor is not None else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of images, videos and sounds."""
        return (self.image_key, self.video_key, "audios")

    def refuse_media(self, file: DataFile) -> None:
        """Raise DataError, with file and row, if a file has media that the model or this version cannot take."""
        for key in self.keys:
            if key not in self._kinds or self.maker is None:
                refuse_media([file], [key], self._why_not(key))

    def _why_not(self, key: str) -> str:
        if key not in self._kinds:
            return "Rows have texts, images and videos here: sounds are not read."
        if self._reader is None:
            return "No image processor was given: the model is one for text, or this command reads texts alone."
        reads = "Images and videos are for models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
        return f"{reads}; this one's processor is {self._reader}."

    def prompt(self, prompt: object, row: Mapping[str, object], where: str) -> ImagePrompt:
        """Check the messages of a row and place its images and videos in them.

        Raises:
            DataError: see :mod:`verl.vision.messages`.
        """
        if self.maker is None:
            plain = row_messages(prompt, where)
            return ImagePrompt(plain, plain, [])
        prompt, media = self.with_placeholders(prompt, row, where)
        return self.placed(row_messages(prompt, where), media, where)

    def with_placeholders(self, prompt: object, row: Mapping[str, object], where: str) -> tuple[object, Media]:
        """Replace parts of messages by ``<image>`` and ``<video>``; return them and the row's images and videos."""
        return with_placeholders(prompt, {kind: row.get(key) for key, kind in self._kinds.items()}, where)

    def placed(self, plain: list[Message], media: Media, where: str) -> ImagePrompt:
        """Place images and videos in checked messages in which ``<image>`` and ``<video>`` stand for them."""
        messages = with_image_parts(plain, {kind: len(items) for kind, items in media.items()}, where)
        items = [Video(value) if kind == "video" else value for kind, value in in_order(messages, media)]
        return ImagePrompt(plain, messages, items)

    def opened(self, prompt: ImagePrompt, where: str) -> ImagePrompt:
        """Choose the frames of the videos of a prompt, whose times Qwen3-VL reads in its messages.

        Raises:
            DataError: a video cannot be used.
        """
        if self.maker is None or not any(isinstance(image, Video) for image in prompt.images):
            return prompt
        images = [self.maker.open(image, where) if isinstance(image, Video) else image for image in prompt.images]
        messages = prompt.messages
        if self.maker.has_times:
            messages = with_times(messages, [clip.times() for clip in images if isinstance(clip, Clip)])
        return replace(prompt, images=images, messages=messages)

    def read(self, prompt: ImagePrompt, where: str) -> tuple[list[Picture], list[int]]:
        """Decode the images of an opened prompt; return them and its clips, and the tokens at each of their places.

        Raises:
            DataError: an image cannot be read or is too narrow.
        """
        if self.maker is None or not prompt.images:
            return [], []
        images = [image if isinstance(image, Clip) else self.maker.read(image, where) for image in prompt.images]
        return images, [count for image in images for count in self.maker.count_tokens(image, where)]

    def _checked(self, prompt: ImagePrompt, where: str, most: int) -> tuple[ImagePrompt, list[int]]:
        """Open a prompt and count its tokens; its videos are decoded unless they alone are more than ``most``."""
        prompt = self.opened(prompt, where)
        images, counts = self.read(prompt, where)
        if sum(counts) <= most:
            for clip in (image for image in images if isinstance(image, Clip)):
                for _ in clip.frames():
                    pass
        return prompt, counts

    def measured(
        self, prompts: Iterable[tuple[RowId, str, ImagePrompt]], workers: int, most: int
    ) -> Iterator[tuple[RowId, ImagePrompt, int]]:
        """Decode all images and videos once, and leave out rows with broken ones, which are named in one warning.

        Args:
            prompts: number, place and prompt of each row.
            workers: threads that decode.
            most: tokens of a row that the run can use. Videos of more are not decoded here.

        Yields:
            number and opened prompt of each row that is left, and the tokens that its images add to its placeholders.
        """
        broken: list[str] = []
        bare: list[str] = []
        total = 0

        def counted(item: tuple[RowId, str, ImagePrompt]) -> tuple[ImagePrompt, list[int]] | DataError:
            try:
                return self._checked(item[2], item[1], most)
            except DataError as error:
                return error

        for part in _parts(prompts):
            total += len(part)
            # Ended before a yield: a caller that fails leaves this generator to the garbage collector, which may run in
            # the start of any thread, where waiting for the end of another one never ends.
            with ThreadPoolExecutor(workers) as pool:
                results = list(pool.map(counted, part))
            for (row_id, where, row_prompt), result in zip(part, results, strict=True):
                if self.maker is not None and not row_prompt.images and _has_placeholder(row_prompt.plain):
                    bare.append(where)
                if isinstance(result, DataError):
                    broken.append(str(result))
                else:
                    prompt, counts = result
                    if counts:
                        self._tokens[row_id] = counts
                    yield row_id, prompt, sum(counts) - len(counts)
        self.broken += broken
        if broken:
            more = f" ... and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
            shown = " | ".join(broken[:SHOWN])
            message = f"{len(broken)} of {total} rows have images or videos that cannot be used: {shown}{more}"
            if len(broken) == total:
                raise DataError(message)
            logger.warning("left out: %s", message)
        if bare:
            logger.warning(
                "%d of %d rows have %s in a text and no image or video for it, which the model reads as text: %s "
                "... Name the columns of images and videos in image_key (now %s) and video_key (%s).",
                *(len(bare), total, " or ".join(PLACEHOLDERS.values()), bare[0], self.image_key, self.video_key),
            )

    def read_counts(self, row_id: object, prompt: ImagePrompt) -> RowImages:
        """Return what :meth:`measured` found of a row."""
        digest = hashlib.blake2b(repr(prompt.images).encode(), digest_size=16).hexdigest() if prompt.images else ""
        return RowImages(self._tokens.get(row_id, []), digest)

    def expanded(self, ids: list[int], mask: list[int], counts: list[int], where: str) -> tuple[list[int], list[int]]:
        """Repeat the n-th token of images or videos, and its place in the loss mask, ``counts[n]`` times.

        Raises:
            DataError: there is another number of such tokens than of counts.
        """
        if self.maker is None or not counts:
            return ids, mask
        pairs = zip(ids, mask, self.maker.repeats(ids, counts, where), strict=True)
        long = [(token, trained) for token, trained, count in pairs for _ in range(count)]
        return [token for token, _ in long], [trained for _, trained in long]

    def columns(self, images: list[Picture], ids: list[int], where: str) -> Mapping[str, torch.Tensor]:
        """Return the inputs of the images by name, and under ``positions`` the position ids, (4, tokens)."""
        assert self.maker is not None
        inputs = self.maker.inputs(images, where)
        return inputs | {"positions": self.maker.positions(ids, inputs)}


def _parts(items: Iterable[T]) -> Iterator[list[T]]:
    part: list[T] = []
    for item in items:
        part.append(item)
        if len(part) == _READ_AT_ONCE:
            yield part
            part = []
    if part:
        yield part
