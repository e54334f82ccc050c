"""Reuse of memory on CPUs: settings of the C allocator, and large buffers that the kernel may reclaim."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # parameter numbers in glibc's malloc.h

# Freed memory that a process keeps at the end of its heap.
KEEP_BYTES = 1 << 30
# Larger blocks are returned to the kernel when they are freed; glibc allows no higher threshold.
MAX_KEPT_BLOCK = 32 << 20

# Larger buffers use small pages: they are often filled in part, and one byte written takes a huge page of 2 MiB.
MAX_HUGE_BLOCK = 256 << 20

# Variables with which users set the same parameters, see mallopt(3); GLIBC_TUNABLES is another way.
ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(all_sizes: bool = False) -> bool:
    """Make glibc keep large freed blocks for the next allocation, for the whole process and until it ends.

    By default glibc returns large blocks to the kernel. The next batch then lies in new pages, which the kernel maps
    and clears at the first write; that takes several times as long as the copy itself. Call it once, early, in
    processes that compute on a CPU or pass batches on (the driver).

    Args:
        all_sizes: keep blocks above 32 MiB too. Then none is returned to the kernel alone, only the free end of the
            heap; so this is for processes that hold batches and no model.

    Returns:
        False if nothing was set: the C library is not glibc, or the user's environment sets the allocator.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set_by_user = "glibc.malloc." in tunables or any(os.environ.get(name) for name in ENVIRONMENT)
    if platform.libc_ver()[0] != "glibc" or is_set_by_user:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_set = bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BLOCK))
    return is_set and (not all_sizes or bool(mallopt(M_MMAP_MAX, 0)))


class ReclaimableBuffers:
    """Reusable buffers whose memory the kernel may reclaim between two uses.

    Freeing and allocating a buffer again costs mapping and clearing each page. A released buffer (``MADV_FREE``, see
    madvise(2)) keeps its pages until memory is short; the kernel then takes them before it swaps or kills anything.
    On systems without ``MADV_FREE`` released buffers are freed.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._used = 0

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next buffer as a tensor of ``size``; it holds zeros or what an earlier use left."""
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        if self._used == len(self._blocks) or len(self._blocks[self._used]) < nbytes:
            self._blocks[self._used :] = [_anonymous(nbytes)]
        block = self._blocks[self._used]
        self._used += 1
        return torch.frombuffer(block, dtype=torch.uint8, count=nbytes).view(dtype)[: math.prod(size)].view(size)

    def release(self) -> None:
        """Make all buffers reclaimable; tensors taken from them must not be used any more."""
        self._used = 0
        if not hasattr(mmap, "MADV_FREE"):
            self.free()
            return
        for block in self._blocks:
            block.madvise(mmap.MADV_FREE)

    def free(self) -> None:
        """Drop all buffers; each is freed with the last tensor taken from it."""
        self._used = 0
        self._blocks.clear()


def _anonymous(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes <= MAX_HUGE_BLOCK:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
