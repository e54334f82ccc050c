"""Values that other threads or processes are still computing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T", covariant=True)
S = TypeVar("S")


@dataclass(frozen=True)
class Deferred(Generic[T]):
    """Handle of a value that is computed in other threads or processes; waiting raises the computation's errors."""

    futures: Sequence[Future[Any]]
    then: Callable[[], T]
    """Computes the value from the results of the futures; waits for those that are not done."""

    @classmethod
    def from_value(cls, value: S) -> Deferred[S]:
        """Return a handle of a value that is there already."""
        return Deferred([], lambda: value)

    def result(self) -> T:
        """Wait for the value in this thread."""
        return self.then()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call this as soon as :meth:`result` need not wait: now, or in the thread that completes the last part."""
        if not self.futures:
            call()
        done = itertools.count(1)  # its next value is atomic

        def note(_: Future[Any]) -> None:
            if next(done) == len(self.futures):
                call()

        for future in self.futures:
            future.add_done_callback(note)

    async def wait(self) -> T:
        """Wait for the value without blocking the event loop."""
        for future in self.futures:
            await asyncio.wrap_future(future)
        return self.then()

    def map(self, change: Callable[[T], S]) -> Deferred[S]:
        """Return a handle of ``change(value)``."""
        return Deferred(self.futures, lambda: change(self.then()))
