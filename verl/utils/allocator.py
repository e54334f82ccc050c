"""What the C allocator does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""

KEEP_BYTES = 1 << 30
"""How much freed memory a process keeps at the end of its heap."""
LARGEST_KEPT_BLOCK = 32 << 20
"""Larger blocks go back to the kernel when they are freed; glibc allows no higher bound."""

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


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(os.environ.get(name) for name in ENVIRONMENT)
