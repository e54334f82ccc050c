"""What becomes of memory that is freed: with the C allocator, and of large blocks that are used again and again."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""

KEEP_BYTES = 1 << 30
"""How much freed memory a process keeps at the end of its heap."""
LARGEST_KEPT_BLOCK = 32 << 20
"""Larger blocks go back to the kernel when they are freed; glibc allows no higher bound."""

LARGEST_HUGE_BLOCK = 256 << 20
"""Larger blocks come in small pages: one byte that is written in a huge page takes all of its 2 MiB."""

ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
"""Where users set the same; see mallopt(3). ``GLIBC_TUNABLES`` may too."""


def keep_freed_memory() -> bool:
    """Let freed memory be used again by this process, instead of giving it back to the kernel at once.

    By default glibc returns large blocks when they are freed. The next batch then lies in pages that the
    kernel has to map and clear at the first write, which takes several times as long as the copy itself.

    Every process of a run does this once, at its start: each :class:`~verl.single_controller.base.Worker`, and a
    driver that has no worker in it. It holds for all memory of the process; nothing undoes it.

    Returns:
        Whether it was set: only with glibc, and not if the user's environment sets the allocator.
    """
    if platform.libc_ver()[0] != "glibc" or _is_set_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK))


class LentPages:
    """Blocks of CPU memory that the kernel may take between two uses, and otherwise finds in place for the next.

    A block that is freed and allocated anew has to be mapped and cleared page by page. One that is lent
    (``MADV_FREE``, see madvise(2)) stays with the process until memory is short: then the kernel takes its pages
    first, before anything is swapped or killed. Where the system has no such thing, blocks are freed.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._taken = 0

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next block, as a tensor of ``size``; its content is zeros, or what it was used for before."""
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        if self._taken == len(self._blocks) or len(self._blocks[self._taken]) < nbytes:
            self._blocks[self._taken :] = [_anonymous(nbytes)]
        block = self._blocks[self._taken]
        self._taken += 1
        return torch.frombuffer(block, dtype=torch.uint8, count=nbytes).view(dtype)[: math.prod(size)].view(size)

    def lend(self) -> None:
        """Let the kernel have all blocks; nobody may use the tensors any more that were made of them."""
        self._taken = 0
        if not hasattr(mmap, "MADV_FREE"):
            self.free()
            return
        for block in self._blocks:
            block.madvise(mmap.MADV_FREE)

    def free(self) -> None:
        """Forget all blocks: each goes back with the last tensor that was made of it."""
        self._taken = 0
        self._blocks.clear()


def _anonymous(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes <= LARGEST_HUGE_BLOCK:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(os.environ.get(name) for name in ENVIRONMENT)
