"""Texts for people, in which the tokens of an image or a video are one word such as ``<image: 64 tokens>``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")


def image_word(count: int, kind: str = "image") -> str:
    """Name an image, or what else ``kind`` says, of so many tokens."""
    return f"<{kind}: {count} token{'' if count == 1 else 's'}>"


def runs(values: Sequence[T]) -> Iterator[tuple[T, int, int]]:
    """Yield each run of equal values: the value, its first place, and the place after it."""
    start = 0
    for value, places in groupby(values):
        end = start + sum(1 for _ in places)
        yield value, start, end
        start = end


def decoded_with_images(tokenizer: Any, ids: Sequence[int], kinds: Sequence[str]) -> str:
    """Decode tokens without special ones; those that stand for an image or a video are named instead.

    Args:
        tokenizer: the policy's.
        ids: the tokens.
        kinds: what each stands for, ``image`` or ``video``, else empty; equal neighbours belong together.
    """
    return "".join(
        image_word(end - start, kind) if kind else tokenizer.decode(ids[start:end], skip_special_tokens=True)
        for kind, start, end in runs(kinds)
    )
