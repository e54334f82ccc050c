"""How many calls of a tool run at once: in a process, or in all processes of a machine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock, Timeout

Slots = Callable[[], AbstractAsyncContextManager[None]]
"""Makes a context in which one call of a tool runs; entering it waits for a free slot."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.1
"""Pauses between two looks at slots that other processes hold."""


class ProcessSlots:
    """At most ``number`` calls at once in this process, from any threads and event loops, in order of arrival."""

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._waiting: deque[Future[None]] = deque()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        place: Future[None] = Future()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                place.set_result(None)
            else:
                self._waiting.append(place)
        try:
            await asyncio.wrap_future(place)
        except asyncio.CancelledError:
            with self._lock:
                was_given = not place.cancel()
            if was_given:
                self._pass_on()
            raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._waiting:
                place = self._waiting.popleft()
                if place.set_running_or_notify_cancel():
                    place.set_result(None)
                    return
            self._free += 1


@asynccontextmanager
async def no_limit() -> AsyncIterator[None]:
    """Enter without a limit."""
    yield


class MachineSlots:
    """At most ``number`` calls at once in all processes of this machine that name the same folder.

    A slot is a locked file, so the slots of a process that dies are free at once.

    Args:
        number: calls at once.
        folder: folder of the files; it is made.
        name: name of the tool.
    """

    def __init__(self, number: int, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / f"{quote(name, safe='')}.{place}.lock" for place in range(number)]
        self._here = ProcessSlots(number)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        async with self._here():
            lock = await self._lock()
            try:
                yield
            finally:
                lock.release()

    async def _lock(self) -> FileLock:
        pause_s = FIRST_PAUSE_S
        while True:
            for file in random.sample(self._files, len(self._files)):
                lock = FileLock(file, thread_local=False)
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    continue
                return lock
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
