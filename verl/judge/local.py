"""The engine of a judge in the trainer's own process, for ``trainer.controller=local``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.agents.local import LocalCall
from verl.serving.router import RolloutEndedError, Router
from verl.utils.deferred import Deferred
from verl.workers.rollout.request import DrawnPart, RolloutRequest
from verl.workers.rollout.request_queue import RequestQueue

T = TypeVar("T")

ASLEEP = (
    "the judge is asleep: it answers only while the rewards of a batch are computed; on ranks of its own "
    "(reward_model.enable_resource_pool=true) also while agent loops hold conversations."
)


class LocalEngines:
    """The one engine, which serves in the main thread while another thread waits for the rewards.

    Args:
        room: most requests that the engine runs at once.
        loop: the running event loop to which the requests belong.
    """

    def __init__(self, room: int, loop: asyncio.AbstractEventLoop) -> None:
        self._room, self._loop = room, loop
        self._router: Router | None = None

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> LocalCall:
        """See :class:`verl.agents.servers.Connection`."""
        router = self._router
        if router is None:
            raise RolloutEndedError(ASLEEP)
        generating = router.generate(conversation, request, on_part)
        return LocalCall(asyncio.run_coroutine_threadsafe(generating, self._loop))

    def end(self, conversation: str) -> None:
        """Do nothing: a judge reads texts, and nothing is kept for further turns."""

    def serve_while(self, group: Any, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """See :meth:`verl.judge.service.Engines.serve_while`; all of it happens in ``result()``."""
        return Deferred([], lambda: self._serve(group, start))

    def _serve(self, group: Any, start: Callable[[], Deferred[T]]) -> T:
        queue = RequestQueue(lambda number, answer: self._loop.call_soon_threadsafe(router.take_answer, number, answer))
        router = Router([queue], self._room)
        served = _Served(queue, lambda: waiting(start(), lambda: self._loop.call_soon_threadsafe(router.close)))
        self._router = router
        try:
            group.serve(served)
            return served.outcome.result()
        finally:
            self._router = None
            self._loop.call_soon_threadsafe(router.close)

    def forget(self) -> None:
        """See :meth:`verl.judge.service.Engines.forget`."""


class _Served:
    """The engine's requests; work that needs its answers begins when it is awake."""

    def __init__(self, queue: RequestQueue, begin: Callable[[], Future[Any]]) -> None:
        self._queue, self._begin = queue, begin
        self.outcome: Future[Any] = Future()

    @contextmanager
    def of_engine(self, number: int) -> Iterator[RequestQueue]:
        """Begin the work, and yield the queue."""
        self.outcome = self._begin()
        yield self._queue


def waiting(handle: Deferred[T], then: Callable[[], object]) -> Future[T]:
    """Wait for a handle in a thread that does not hold up the end of the process; call ``then`` when it is done."""
    outcome: Future[T] = Future()

    def wait() -> None:
        try:
            outcome.set_result(handle.result())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever waits for the outcome raises it
            outcome.set_exception(error)
        finally:
            then()

    threading.Thread(target=wait, name="rewards", daemon=True).start()
    return outcome
