"""Keys and values of earlier texts, kept in a tree for texts that begin with the same tokens and images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.memory import CacheShape
from verl.workers.rollout.placed_images import ImageSpan

PAGE = 16
"""Tokens of a page, the unit in which texts are kept and recognised."""


@dataclass(eq=False, slots=True)
class _Page:
    """The states of ``PAGE`` tokens that follow the pages above it in the tree."""

    parent: _Page | None
    key: bytes
    """Tokens of the page, and the hashes of the images that they stand for."""
    index: int
    """Index of the page in the memory of all pages."""
    children: dict[bytes, _Page] = field(default_factory=dict)


class PrefixCache:
    """Keys and values of texts, page by page; when there is no free page, the least recently used one is dropped.

    They are valid for one version of the weights: make another cache, or :meth:`clear` this one, after an update.

    Args:
        shape: dimensions, format and place of keys and values.
        pages: number of pages, at least one, all allocated here.
    """

    def __init__(self, shape: CacheShape, pages: int) -> None:
        self._states = shape.allocate(pages, PAGE)
        """Keys and values, (layers, pages, kv_heads, PAGE, head_dim) each."""
        self._root = _Page(None, b"", -1)
        # From the least to the most recently used. A page is never older than those below it, so the first one is a
        # leaf.
        self._order: OrderedDict[_Page, None] = OrderedDict()
        self._free = iter(range(pages))
        self.hits = 0
        """Tokens whose states :meth:`find` has found."""

    def __len__(self) -> int:
        """Return the number of pages in use."""
        return len(self._order)

    def find(self, tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> Prefix:
        """Find the longest prefix of ``tokens`` that is kept, in whole pages and shorter than ``tokens``.

        ``images`` are those in the text: pages with tokens of an image are found by its content too.
        """
        pages = list(self._walk(_keys(tokens[:-1], images)))
        self._use(pages)
        return Prefix(tuple(page.index for page in pages))

    def states(self, prefix: Prefix) -> Tensor:
        """Return a copy of the states of a prefix just found, (2, layers, kv_heads, tokens, head_dim)."""
        self.hits += len(prefix)
        page_indices = torch.tensor(prefix.pages, device=self._states[0].device)
        # (layers, pages, kv_heads, PAGE, head_dim) to (layers, kv_heads, pages * PAGE, head_dim)
        return torch.stack([part[:, page_indices].transpose(1, 2).flatten(2, 3) for part in self._states])

    def add(
        self, tokens: Sequence[int], states_of: Callable[[int, int], Tensor], images: Sequence[ImageSpan] = ()
    ) -> None:
        """Keep the whole pages of a text that are not kept yet, as many as there is room for.

        Args:
            tokens: the text.
            states_of: returns the states, (2, layers, kv_heads, tokens, head_dim), of the tokens between two positions.
            images: those in the text.
        """
        keys = _keys(tokens, images)
        pages = list(self._walk(keys))
        self._use(pages)
        cached = len(pages)
        for key in keys[cached:]:
            page_index = self._free_page(pages)
            if page_index is None:
                break
            parent = pages[-1] if pages else self._root
            page = parent.children[key] = _Page(parent, key, page_index)
            self._order[page] = None
            pages.append(page)
        if len(pages) == cached:
            return
        self._use(pages)
        page_indices = torch.tensor([page.index for page in pages[cached:]], device=self._states[0].device)
        for memory, part in zip(self._states, states_of(cached * PAGE, len(pages) * PAGE), strict=True):
            memory[:, page_indices] = part.unflatten(2, (-1, PAGE)).transpose(1, 2)

    def clear(self) -> None:
        """Drop all texts."""
        self._root.children.clear()
        self._order.clear()
        self._free = iter(range(self._states[0].shape[1]))

    def _walk(self, keys: Sequence[bytes]) -> Iterator[_Page]:
        page = self._root
        for key in keys:
            child = page.children.get(key)
            if child is None:
                return
            page = child
            yield page

    def _use(self, path: Sequence[_Page]) -> None:
        for page in reversed(path):
            self._order.move_to_end(page)

    def _free_page(self, path: Sequence[_Page]) -> int | None:
        """Return the index of a free page, dropping the oldest one if need be, but none of ``path``, just used."""
        page_index = next(self._free, None)
        if page_index is not None:
            return page_index
        oldest = next(iter(self._order))
        if oldest.children or oldest is (path[-1] if path else None):
            return None
        assert oldest.parent is not None
        del self._order[oldest], oldest.parent.children[oldest.key]
        return oldest.index


@dataclass(frozen=True)
class Prefix:
    """The beginning of a text that the cache holds."""

    pages: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return its number of tokens."""
        return len(self.pages) * PAGE


def _keys(tokens: Sequence[int], images: Sequence[ImageSpan]) -> list[bytes]:
    """Return the token ids of each whole page as bytes, and after them the hashes of the images on it."""
    count = len(tokens) // PAGE
    data = np.asarray(tokens[: count * PAGE], dtype=np.int32).tobytes()
    size = PAGE * 4
    keys = [data[start : start + size] for start in range(0, len(data), size)]
    for image in images:
        for page in range(image.start // PAGE, min((image.end - 1) // PAGE + 1, count)):
            keys[page] += image.digest
    return keys
