"""Images of trajectories: as inputs of the policy in its turns, and as inputs of the trainer in its sequences."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from verl.agents.turns import DrawnTurn, drawn_log_probs
from verl.datasets.chat import Message, as_messages
from verl.errors import ConfigError
from verl.protocol.shared import SharedTensors, joined
from verl.vision.families import IMAGE_INPUTS, SECONDS, TEXT_PLACES, VisionConfig
from verl.vision.messages import has_image_parts, held_by, kind_of, timed, with_images, without_images
from verl.vision.prompts import ImagePrompts
from verl.vision.videos import Clip, Video
from verl.workers.rollout.placed_images import digests, note_digests

INPUTS = "multi_modal_inputs"
"""Column of the images of a row, and key of ``AgentLoopOutput.multi_modal_data`` for images that are inputs already."""
NO_IMAGES = SharedTensors({})
"""Shared by all conversations without images, so that it is made once."""
FOR_TEXT = (
    "the policy reads no images: it is a model for text, or of none of the families Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
)

VIDEOS_APART = (
    "videos are not given apart from images. Hold the conversation in verl.agents.conversation.Conversation: its "
    "messages may have parts {'type': 'video', 'video': ...}, and its image_data has the images and the videos."
)


def as_inputs(images: object, maker: ImagePrompts | None, where: str) -> SharedTensors:
    """Return images as inputs of the model, empty if there are none.

    Args:
        images: a list of images, each as :func:`verl.vision.images.read_image` takes it; or ``multi_modal_inputs`` of a
            row, which are inputs already; or None.
        maker: of the policy's processor; None for a model for text.
        where: for errors.

    Raises:
        DataError: an image cannot be read.
        ConfigError: there are images, and the policy reads none, or they have another form.
    """
    if images is None or (isinstance(images, Mapping | list | tuple) and not images):
        return NO_IMAGES
    if maker is None:
        raise ConfigError(f"{where}: there are images, and {FOR_TEXT}.")
    if isinstance(images, Mapping):
        if not set(images) >= set(IMAGE_INPUTS):
            raise ConfigError(
                f"{where}: images are a mapping with {', '.join(map(str, images))}. Give a list of images, or "
                f"{INPUTS} of the row, which has {' and '.join(IMAGE_INPUTS)}."
            )
        return images if isinstance(images, SharedTensors) else SharedTensors(images)
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise ConfigError(f"{where}: images are {type(images).__name__}, and must be a list of images.")
    read = [maker.read(image, f"{where}, image {index}") for index, image in enumerate(images)]
    return SharedTensors(maker.inputs(read, where))


async def read_messages(source: Sequence[object], where: str, maker: ImagePrompts | None) -> list[Message]:
    """Check messages of users' code; what their image and video parts hold becomes inputs of the policy.

    Args:
        source: messages as an OpenAI client would write them, which may have parts ``{"type": "image", "image": ...}``
            and ``{"type": "video", "video": ...}``.
        where: for errors.
        maker: of the policy's processor; None for a model for text.

    Returns:
        The messages, as :func:`opened` returns them.

    Raises:
        DataError: a message, an image or a video cannot be read.
        ConfigError: there are images or videos, and the policy reads none; or the package for files of videos is
            missing.
    """
    if not all(isinstance(message, Mapping) for message in source):
        return as_messages(source, where)  # says what is wrong
    bare, sources = without_images([dict(message) for message in cast(Sequence[Message], source)])
    messages = as_messages(bare, where, with_images=True)
    if not any(sources):
        return messages
    filled = with_images(messages, sources)
    return await asyncio.to_thread(opened, filled, maker, where)  # decoding would block all other conversations


def opened(messages: Sequence[Message], maker: ImagePrompts | None, where: str) -> list[Message]:
    """Make inputs of the policy of what image and video parts of messages hold.

    Args:
        messages: checked ones.
        maker: of the policy's processor; None for a model for text.
        where: for errors.

    Returns:
        The messages, with the parts of :func:`media_parts`. A part that holds nothing stays as it is.

    Raises:
        DataError, ConfigError: see :func:`media_parts`.
    """
    numbers = Counter[str]()

    def parts(part: Message) -> list[Message]:
        kind, held = kind_of(part), held_by(part)
        if kind is None or held is None:
            return [part]
        numbers[kind] += 1
        return media_parts(kind, held, maker, f"{where}, {kind} {numbers[kind] - 1}")

    return [
        {**message, "content": [part_read for part in message["content"] for part_read in parts(part)]}
        if has_image_parts(message.get("content"))
        else message
        for message in messages
    ]


def media_parts(kind: str, value: object, maker: ImagePrompts | None, where: str) -> list[Message]:
    """Return the parts of a message that show an image or a video, which hold inputs of the policy.

    There is one part, or for a video of Qwen3-VL one for each step of its time, with its second as a text before it.

    Args:
        kind: ``image`` or ``video``.
        value: see :func:`verl.vision.images.read_image` and :func:`verl.vision.videos.open_video`.
        maker: of the policy's processor; None for a model for text.
        where: for errors.

    Raises:
        DataError: it cannot be read.
        ConfigError: the policy reads none, or the package for files of videos is missing.
    """
    inner = value.get(kind) if isinstance(value, Mapping) else None
    if isinstance(inner, SharedTensors):  # is inputs already
        return [{"type": kind, kind: inner}]
    if maker is None:
        raise ConfigError(f"{where}: a message has {'an image' if kind == 'image' else 'a video'}, and {FOR_TEXT}.")
    picture = maker.open(Video(value), where) if kind == "video" else maker.read(value, where)
    parts = [{"type": kind, kind: inputs} for inputs in apart(SharedTensors(maker.inputs([picture], where)))]
    return timed(parts, picture.times()) if isinstance(picture, Clip) and maker.has_times else parts


def apart(images: SharedTensors) -> list[SharedTensors]:
    """Return the inputs of each image: the other way round than :func:`together`."""
    if not len(images):
        return []
    pixels, grid = (images[name] for name in IMAGE_INPUTS)
    parts = zip(pixels.split([int(count) for count in grid.prod(-1)]), grid.split(1), strict=True)
    media: list[dict[str, Tensor]] = [dict(zip(IMAGE_INPUTS, pair, strict=True)) for pair in parts]
    if SECONDS in images:
        media = [part | {SECONDS: value} for part, value in zip(media, images[SECONDS].split(1), strict=True)]
    return [SharedTensors(part) for part in media]


def together(parts: Sequence[SharedTensors]) -> SharedTensors:
    """Join inputs of images, in their order; a single part stays the same object."""
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return some[0] if some else NO_IMAGES
    tensors = {name: joined(some, name) for name in IMAGE_INPUTS}
    if any(SECONDS in part for part in some):
        seconds = [part[SECONDS] if SECONDS in part else torch.zeros(len(part[IMAGE_INPUTS[1]])) for part in some]
        tensors[SECONDS] = torch.cat(seconds)
    shared = SharedTensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
    note_digests(shared, tuple(digest for part in some for digest in digests(part)))
    return shared


def token_counts(images: SharedTensors, vision: VisionConfig) -> list[int]:
    """Return the number of tokens of each image."""
    return [vision.tokens_of(grid) for grid in images[IMAGE_INPUTS[1]]] if len(images) else []


def expanded(ids: Sequence[int], counts: Sequence[int], maker: ImagePrompts, where: str) -> list[int]:
    """Repeat the image token of each image of a rendered text as often as the image has tokens.

    Raises:
        DataError: there is another number of image tokens than of images.
    """
    maker.repeats(ids, counts, where)
    return maker.expanded(ids, counts)


def text_places(
    ids: Sequence[int], images: SharedTensors, turns: Sequence[DrawnTurn], vision: VisionConfig
) -> tuple[int, ...]:
    """Return the places of tokens with the id of images that stand for none, because the policy drew them.

    Raises:
        ConfigError: the other tokens with this id are not those of the images.
    """
    if not any(token in ids for token in vision.token_ids):
        text_positions, image_count = (), 0
    else:
        values = drawn_log_probs(ids, turns)
        places = [position for position, token_id in enumerate(ids) if token_id in vision.token_ids]
        text_positions = tuple(position for position in places if values[position] is not None)
        image_count = len(places) - len(text_positions)
    expected = sum(token_counts(images, vision))
    if image_count != expected:
        raise ConfigError(
            f"prompt_ids have {image_count} image tokens, and image_data makes {expected}. Give all images of the "
            f"conversation in their order as image_data: a list, or kwargs['{INPUTS}'] for those of the row."
        )
    return text_positions


def images_of_sequence(
    ids: Sequence[int],
    is_sampled: Sequence[bool],
    turns: Sequence[DrawnTurn],
    image_inputs: SharedTensors | None,
    row_images: SharedTensors,
    most: int,
    vision: VisionConfig,
) -> tuple[SharedTensors, int]:
    """Return the images of a training sequence, and how many of its tokens stay.

    Args:
        ids: the sequence.
        is_sampled: which of its tokens the policy drew.
        turns: the turns of the policy, with the images that it was shown.
        image_inputs: what the agent loop says are the images; None takes those of the last turn in the sequence.
        row_images: the images of the row, for a sequence without a turn.
        most: tokens that may stay. A sequence is not cut within an image, but before it.
        vision: the policy's.

    Raises:
        ConfigError: the image tokens are not those of the images, or the policy was shown other images.
    """
    shown = _shown(ids, turns)
    images = image_inputs if image_inputs is not None else row_images if shown is None else shown
    places = [position for position, token in enumerate(ids) if token in vision.token_ids and not is_sampled[position]]
    counts = token_counts(images, vision)
    if not places and image_inputs is None:
        return NO_IMAGES, min(most, len(ids))
    if len(places) != sum(counts):
        raise ConfigError(
            f"a sequence has {len(places)} image tokens that the policy did not draw, and its {len(counts)} images "
            f"make {sum(counts)}. Give all of its images in their order: multi_modal_data={{'images': [...]}}."
        )
    if (
        image_inputs is not None
        and shown is not None
        and digests(image_inputs)[: len(digests(shown))] != digests(shown)
    ):
        raise ConfigError(
            "multi_modal_data has other images than the policy was shown in its turns. Give those of image_data, in "
            "the same order and size."
        )
    end, before, num_images = min(most, len(ids)), 0, 0
    for count in counts:
        if places[before + count - 1] >= most:
            end = min(end, places[before])
            break
        before, num_images = before + count, num_images + 1
    return _first(images, num_images, counts), end


def with_text_places(
    images: SharedTensors, ids: Sequence[int], is_sampled: Sequence[bool], prompt_length: int, vision: VisionConfig
) -> SharedTensors:
    """Add the places of tokens with the id of images that the policy drew, where the trainer needs to be told.

    That is in a prompt, and in a response with images; a response without any is text. The same object returns if there
    are no such tokens.
    """
    places = [position for position, token in enumerate(ids) if token in vision.token_ids]
    texts = [position for position in places if is_sampled[position]]
    if all(is_sampled[position] for position in places if position >= prompt_length):
        texts = [position for position in texts if position < prompt_length]
    return SharedTensors({**images, TEXT_PLACES: torch.tensor(texts)}) if texts else images


def _shown(ids: Sequence[int], turns: Sequence[DrawnTurn]) -> SharedTensors | None:
    """The images of the last turn of a sequence; None if it has no turn."""
    written = list(ids)
    matching = [turn for turn in turns if written[: len(turn.prompt_ids)] == turn.prompt_ids]
    if not matching:
        return None

    def rank(turn: DrawnTurn) -> tuple[bool, int]:
        start = len(turn.prompt_ids)
        return written[start : start + len(turn.token_ids)] == turn.token_ids, start

    return max(matching, key=rank).images or NO_IMAGES


def _first(images: SharedTensors, count: int, counts: Sequence[int]) -> SharedTensors:
    """The first images."""
    if count == len(counts):
        return images
    if not count:
        return NO_IMAGES
    pixels, grid = (images[name] for name in IMAGE_INPUTS)
    patches = int(grid[:count].prod(-1).sum())
    first = dict(zip(IMAGE_INPUTS, (pixels[:patches], grid[:count]), strict=True))
    return SharedTensors(first | ({SECONDS: images[SECONDS][:count]} if SECONDS in images else {}))
