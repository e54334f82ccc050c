"""Texts for people, in which the tokens of an image are one word such as ``<image: 64 tokens>``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any


def image_word(count: int) -> str:
    """Name an image of so many tokens."""
    return f"<image: {count} token{'' if count == 1 else 's'}>"


def runs(is_image: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """Yield each run of equal values: the value, its first place, and the place after it."""
    start = 0
    for value, places in groupby(is_image):
        end = start + sum(1 for _ in places)
        yield bool(value), start, end
        start = end


def decoded_with_images(tokenizer: Any, ids: Sequence[int], is_image: Sequence[bool]) -> str:
    """Decode tokens without special ones; those that stand for an image are named instead.

    Args:
        tokenizer: the policy's.
        ids: the tokens.
        is_image: which of them stand for images; neighbours belong to one image.
    """
    return "".join(
        image_word(end - start) if images else tokenizer.decode(ids[start:end], skip_special_tokens=True)
        for images, start, end in runs(is_image)
    )
