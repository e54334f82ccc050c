"""Messages with images and videos: where those of a row stand in its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.base.types import JsonMapping, JsonObject
from verl.errors import DataError

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}
"""Placeholders in a text for an image and for a video."""
_KIND_OF_PART = {"image": "image", "image_url": "image", "video": "video"}
_TIME = re.compile(r"<\d+\.\d seconds>")
"""Text that processors write before each time step of a video."""
Message = JsonObject


def with_placeholders(
    prompt: object, media: Mapping[str, object], where: str
) -> tuple[object, dict[str, list[object]]]:
    """Replace image and video parts of messages by ``<image>`` and ``<video>``; return the messages and what they held.

    Args:
        prompt: of a row, a string or messages; anything else is returned as it is, and refused later.
        media: under ``image`` the row's column of images, under ``video`` that of videos, or None. Parts that bring
            nothing take these in turn. Parts of a kind that is not named stay.
        where: file and row, for errors.

    Raises:
        DataError: parts bring images and the column has some too, or the column holds no list.
    """
    columns = {kind: _listed(values, kind, where) for kind, values in media.items()}
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return prompt, columns
    inline: dict[str, list[object]] = {kind: [] for kind in media}
    messages = [_message(message, inline) for message in prompt]
    for kind, given_values in inline.items():
        inline_values = [value for value in given_values if value is not None]
        if inline_values and (columns[kind] or len(inline_values) != len(given_values)):
            raise DataError(
                f"{where}: some {kind} parts of the messages bring their {kind} and others do not. Keep all {kind}s in "
                f"the column of {kind}s, or all in the messages."
            )
        columns[kind] = inline_values or columns[kind]
    return messages, columns


def _listed(values: object, kind: str, where: str) -> list[object]:
    if values is None:
        return []
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise DataError(f"{where}: the {kind}s of a row are a list, and this is {type(values).__name__}.")
    return list(values)


def _message(message: Any, inline: Mapping[str, list[object]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(kind_of(part) in inline for part in content):
        return message
    parts = []
    for part in content:
        kind = kind_of(part)
        if kind is None or kind not in inline:
            parts.append(part)
            continue
        inline[kind].append(held_by(part))
        parts.append({"type": "text", "text": PLACEHOLDERS[kind]})
    return {**message, "content": parts}


def kind_of(part: object) -> str | None:
    """Return ``image`` or ``video`` for a part of a message that stands for one, else None."""
    return _KIND_OF_PART.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def held_by(part: Mapping[str, object]) -> JsonObject | None:
    """Return what an image or video part brings; None if it stands for one of its row."""
    return {key: value for key, value in part.items() if key != "type" and value is not None} or None


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Take images and videos out of their parts; return the messages, whose parts hold nothing, and what they held.

    A part without an image or video gives None. The given messages stay as they are.
    """
    images: list[object] = []
    return [_bare(message, images) for message in messages], images


def _bare(message: Message, images: list[object]) -> Message:
    content = message.get("content")
    if not has_image_parts(content):
        return message
    parts: list[object] = []
    for part in content or ():
        if is_image_part(part):
            images.append(held_by(part))
            part = bare_part(part)
        parts.append(part)
    return {**message, "content": parts}


def with_images(messages: Sequence[Message], images: Sequence[JsonMapping | None]) -> list[Message]:
    """Give image and video parts what they hold, in their order: the reverse of :func:`without_images`."""
    held = iter(images)

    def filled(message: Message) -> Message:
        content = message.get("content")
        if not has_image_parts(content):
            return message
        parts = [{**part, **(next(held) or {})} if is_image_part(part) else part for part in content or ()]
        return {**message, "content": parts}

    return [filled(message) for message in messages]


def has_image_parts(content: object) -> bool:
    """Return whether the content of a message has an image or video part."""
    return isinstance(content, list) and any(is_image_part(part) for part in content)


def has_video_parts(content: object) -> bool:
    """Return whether the content of a message has a video part."""
    return isinstance(content, list) and any(kind_of(part) == "video" for part in content)


def is_image_part(part: object) -> bool:
    """Return whether a part of a message stands for an image or a video."""
    return kind_of(part) is not None


def texts_of(content: Any) -> list[tuple[int, str]]:
    """Return the texts of a content, each with the number of its part; times of the steps of videos are none."""
    if isinstance(content, str):
        return [(0, content)]
    parts = list(content or ())
    after = [kind_of(part) for part in parts[1:]] + [None]
    return [
        (index, part["text"])
        for index, (part, following) in enumerate(zip(parts, after, strict=True))
        if not (is_image_part(part) or (following == "video" and _TIME.fullmatch(part["text"])))
    ]


def bare_part(part: JsonMapping) -> dict[str, str]:
    """Return an image or video part that holds nothing, as chat templates take it."""
    return {"type": _KIND_OF_PART[part["type"]]}


def with_image_parts(messages: Sequence[Message], counts: Mapping[str, int], where: str) -> list[Message]:
    """Split texts at ``<image>`` and ``<video>`` into the parts that chat templates of these models know.

    Args:
        messages: checked ones, with texts as content.
        counts: images and videos of the row, by kind. Without any of a kind its placeholder is text.
        where: file and row, for errors.

    Raises:
        DataError: the texts have another number of placeholders than the row has images or videos.
    """
    kinds = {PLACEHOLDERS[kind]: kind for kind, count in counts.items() if count}
    if not kinds:
        return list(messages)
    for mark, kind in kinds.items():
        marks = sum((message["content"] or "").count(mark) for message in messages)
        if marks != counts[kind]:
            raise DataError(
                f"{where}: the messages have {marks} {mark} placeholder(s), and the row has {counts[kind]} {kind}(s). "
                f"Write {mark} once for each {kind}, where it belongs."
            )
    at = re.compile(f"({'|'.join(kinds)})")
    return [
        {**message, "content": _parts(at.split(message["content"]), kinds)}
        if at.search(message["content"] or "")
        else message
        for message in messages
    ]


def _parts(pieces: Sequence[str], kinds: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"type": kinds[piece]} if index % 2 else {"type": "text", "text": piece}
        for index, piece in enumerate(pieces)
        if piece
    ]


def in_order(messages: Sequence[Message], media: Mapping[str, Sequence[object]]) -> Iterator[tuple[str, object]]:
    """Yield kind and value of the images and videos of a row in the order of the parts that stand for them."""
    values = {kind: iter(items) for kind, items in media.items()}
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] in values:
                yield part["type"], next(values[part["type"]])


def with_times(messages: Sequence[Message], times: Sequence[Sequence[float]]) -> list[Message]:
    """Write each video part as one for each step of its time, with the second before it, as Qwen3-VL reads videos.

    Args:
        messages: of :func:`with_image_parts`.
        times: of each video in turn, seconds of the steps.
    """
    remaining = iter(times)

    def spread(part: Message) -> list[Message]:
        if part["type"] != "video":
            return [part]
        times = next(remaining)
        return timed([dict(part) for _ in times], times)

    return [
        {**message, "content": [new_part for part in message["content"] for new_part in spread(part)]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def timed(parts: Sequence[Message], times: Sequence[float]) -> list[Message]:
    """Put before the part of each step of a video its second, as a text."""
    texts = ({"type": "text", "text": f"<{second:.1f} seconds>"} for second in times)
    return [item for pair in zip(texts, parts, strict=True) for item in pair]
