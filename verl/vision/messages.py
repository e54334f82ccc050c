"""Messages with images: where the images of a row stand in its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError

PLACEHOLDER = "<image>"
Message = dict[str, Any]


def with_placeholders(prompt: Any, images: Any, place: str) -> tuple[Any, list[Any]]:
    """Replace image parts of messages by the text ``<image>``; return the messages and the row's images in order.

    Args:
        prompt: of a row, a string or messages; anything else is returned as it is, for others to refuse.
        images: of the row's column of images, or None. Image parts without an image of their own take these in turn.
        place: file and row, for errors.

    Raises:
        DataError: parts bring images and the column has some too, or the column holds no list.
    """
    column = _listed(images, place)
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return prompt, column
    inline: list[Any] = []
    messages = [_message(message, inline) for message in prompt]
    own = [image for image in inline if image is not None]
    if own and (column or len(own) != len(inline)):
        raise DataError(
            f"{place}: some image parts of the messages bring their image and others do not. Keep all images in the "
            "column of images, or all in the messages."
        )
    return messages, own or column


def _listed(images: Any, place: str) -> list[Any]:
    if images is None:
        return []
    if isinstance(images, str | bytes | Mapping) or not isinstance(images, Sequence):
        raise DataError(f"{place}: the images of a row are a list, and this is {type(images).__name__}.")
    return list(images)


def _message(message: Any, inline: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not has_image_parts(content):
        return message
    parts = []
    for part in content or ():
        if not is_image_part(part):
            parts.append(part)
            continue
        given = {key: value for key, value in part.items() if key != "type" and value is not None}
        inline.append(given or None)
        parts.append({"type": "text", "text": PLACEHOLDER})
    return {**message, "content": parts}


def without_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Take the images out of image parts; return the messages, whose image parts hold nothing, and what they held.

    A part without an image gives None. The given messages stay as they are.
    """
    images: list[Any] = []
    return [_bare(message, images) for message in messages], images


def _bare(message: Message, images: list[Any]) -> Message:
    content = message.get("content")
    if not has_image_parts(content):
        return message
    parts: list[Any] = []
    for part in content or ():
        if is_image_part(part):
            images.append({key: value for key, value in part.items() if key != "type" and value is not None} or None)
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def with_images(messages: Sequence[Message], images: Sequence[Mapping[str, Any] | None]) -> list[Message]:
    """Give image parts what they hold, in their order: the other way round than :func:`without_images`."""
    held = iter(images)

    def filled(message: Message) -> Message:
        content = message.get("content")
        if not has_image_parts(content):
            return message
        parts = [{**part, **(next(held) or {})} if is_image_part(part) else part for part in content or ()]
        return {**message, "content": parts}

    return [filled(message) for message in messages]


def has_image_parts(content: Any) -> bool:
    """Whether the content of a message has an image part."""
    return isinstance(content, list) and any(is_image_part(part) for part in content)


def is_image_part(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def with_image_parts(messages: Sequence[Message], count: int, place: str) -> list[Message]:
    """Split texts at ``<image>`` into text parts and image parts, which chat templates of these models know.

    Args:
        messages: checked ones, with texts as content.
        count: images of the row. A row without images keeps its texts, whatever they hold.
        place: file and row, for errors.

    Raises:
        DataError: the texts have another number of placeholders than the row has images.
    """
    if not count:
        return list(messages)
    found = sum((message["content"] or "").count(PLACEHOLDER) for message in messages)
    if found != count:
        raise DataError(
            f"{place}: the messages have {found} {PLACEHOLDER} placeholder(s), and the row has {count} image(s). Write "
            f"{PLACEHOLDER} once for each image, where it belongs."
        )
    return [
        {**message, "content": _parts(message["content"])} if PLACEHOLDER in (message["content"] or "") else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
