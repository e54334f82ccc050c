"""Begin and end of each call of a worker's registered methods, and the memory that it held afterwards.

The process keeps them; the driver fetches them once a step (``WorkerGroups.call_times``), so that a call itself carries
nothing more than before.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch

from verl.utils.run_log import clock

MIB = 2**20
MAX_CALLS = 10_000
"""Calls that a process keeps while nobody fetches them; older ones are dropped."""


class CallTime(NamedTuple):
    """One call of a registered method on one rank."""

    name: str
    """Class and method of the worker."""
    begin: float
    """Seconds since 1970 by the clock of the rank's machine."""
    end: float
    rss_mb: float
    """Resident memory of the process at the end of the call, in MiB."""
    device_mb: float | None
    """GPU memory that PyTorch's allocator has reserved at the end of the call, in MiB; None without a GPU."""


_calls: deque[CallTime] = deque(maxlen=MAX_CALLS)


@contextmanager
def timed_call(name: str) -> Iterator[None]:
    """Keep begin, end and memory of the block, also if it raises."""
    begin = clock()
    try:
        yield
    finally:
        end = clock()
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        device_mb = torch.cuda.memory_reserved() / MIB if on_device else None
        _calls.append(CallTime(name, begin, end, _process(os.getpid()).memory_info().rss / MIB, device_mb))


@functools.cache
def _process(pid: int) -> psutil.Process:
    """By id, because Ray's workers may be forks of a process that has called this."""
    return psutil.Process(pid)


def take_call_times() -> list[CallTime]:
    """Return the calls of this process since the last take, in the order of their ends, and forget them."""
    calls: list[CallTime] = []
    while _calls:  # another thread may add one meanwhile
        calls.append(_calls.popleft())
    return calls
