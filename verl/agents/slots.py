"""Limits on concurrent calls of a tool: in a process, or in all processes of a run."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager

Slots = Callable[[], AbstractAsyncContextManager[None]]
"""Makes a context in which one call of a tool runs; entering it waits for a free slot."""


class ProcessSlots:
    """At most ``number`` calls at once in this process, from any threads and event loops, in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._waiting: deque[Future[None]] = deque()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        slot: Future[None] = Future()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                slot.set_result(None)
            else:
                self._waiting.append(slot)
        try:
            await asyncio.wrap_future(slot)
        except asyncio.CancelledError:
            with self._lock:
                was_given = not slot.cancel()
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
                slot = self._waiting.popleft()
                if slot.set_running_or_notify_cancel():
                    slot.set_result(None)
                    return
            self._free += 1


@asynccontextmanager
async def no_limit() -> AsyncIterator[None]:
    """Enter without a limit."""
    yield


class SlotTable:
    """The slots of all tools of a run, and the calls that hold them; used from one event loop.

    A call asks by :meth:`take` and gives back by :meth:`give`, also if it no longer waits. The two may arrive in any
    order.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[str, str]] = {}
        """Calls that hold a slot, by tool, and their processes."""
        self._waiting: dict[str, dict[str, tuple[str, asyncio.Future[None]]]] = {}
        self._given_up: set[str] = set()
        """Calls that were given up before they asked."""
        self._lost: set[str] = set()

    async def take(self, tool: str, limit: int, call: str, process: str) -> None:
        """Hold a slot for a call as soon as fewer than ``number`` calls do, in order of arrival."""
        if process in self._lost or call in self._given_up:
            self._given_up.discard(call)
            return
        held, waiting = self._held.setdefault(tool, {}), self._waiting.setdefault(tool, {})
        if len(held) < limit:
            held[call] = process
            return
        turn = asyncio.get_running_loop().create_future()
        waiting[call] = process, turn
        await turn

    def give(self, tool: str, call: str) -> None:
        """Give the slot of a call back, or end its wait."""
        held, waiting = self._held.get(tool, {}), self._waiting.get(tool, {})
        if call in waiting:
            waiting.pop(call)[1].set_result(None)
        elif call not in held:
            self._given_up.add(call)
        else:
            del held[call]
            if waiting:
                following = next(iter(waiting))
                process, turn = waiting.pop(following)
                held[following] = process
                turn.set_result(None)

    def lose(self, process: str) -> None:
        """Give back what a process that is no more holds or waits for."""
        self._lost.add(process)
        for tool, waiting in self._waiting.items():
            for call in [call for call, (holder, _) in waiting.items() if holder == process]:
                self.give(tool, call)
        for tool, held in self._held.items():
            for call in [call for call, holder in held.items() if holder == process]:
                self.give(tool, call)


MakeSlots = Callable[[str, int], Slots]
"""Makes the slots of a tool by its name and their limit."""
_make: MakeSlots = lambda tool, limit: ProcessSlots(limit)  # noqa: E731


def slots_of_run(tool: str, limit: int) -> Slots:
    """Slots that all processes of a run share: at most ``limit`` calls of the tool at once."""
    return _make(tool, limit)


def count_by(make: MakeSlots) -> None:
    """Count the calls of this process together with those of the other processes of its run."""
    global _make
    _make = make
