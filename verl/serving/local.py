"""A session with the one engine of this process, for ``trainer.controller=local``.

The engine serves in the thread that waits for the work, the main thread; the router runs beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from verl.serving.connection import LocalConnection
from verl.serving.router import ENDED, Router
from verl.serving.state import SessionState
from verl.utils.deferred import Deferred
from verl.workers.rollout.request_queue import RequestQueue

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

T = TypeVar("T")


class _LocalRequests:
    """See :class:`verl.workers.rollout.request_queue.EngineRequests`."""

    def __init__(self, queue: RequestQueue, on_awake: Callable[[int], object]) -> None:
        self._queue, self._on_awake = queue, on_awake

    @contextmanager
    def open_queue(self, engine_index: int, weight_version: int) -> Iterator[RequestQueue]:
        """Tell that the engine is awake, and yield the queue."""
        self._on_awake(weight_version)
        yield self._queue


class LocalSession(LocalConnection):
    """See :class:`verl.serving.session.Session`.

    Args:
        room: most requests that the engine runs at once.
        loop: the running event loop of the router.
        ended: message of the error with which requests are refused while the engine sleeps.
    """

    def __init__(self, room: int, loop: asyncio.AbstractEventLoop, ended: str = ENDED) -> None:
        super().__init__(Router(room, ended), loop)

    def serve_while(self, group: WorkerGroup, start: Callable[[], Future[T]]) -> Deferred[T]:
        """See :meth:`verl.serving.session.Session.serve_while`; all of it happens in ``result()``."""
        return Deferred([], lambda: self._serve(group, start))

    def _serve(self, group: WorkerGroup, start: Callable[[], Future[T]]) -> T:
        router, in_loop = self.router, self.loop.call_soon_threadsafe
        queue = RequestQueue(lambda request_id, answer: in_loop(router.take_answer, request_id, answer))
        started: list[Future[T]] = []

        def begin(weight_version: int) -> None:
            router.weight_version = weight_version
            in_loop(router.open, [queue])
            work = start()
            started.append(work)
            work.add_done_callback(lambda _: in_loop(router.close))

        try:
            with group.limit_silence(lambda: max((s for s in router.silences() if s is not None), default=0.0)):
                group.serve(_LocalRequests(queue, begin))
            [work] = started
            return work.result()
        finally:
            for work in started:
                work.cancel()  # does nothing once it is done
            in_loop(router.close)

    def pause(self) -> None:
        """See :meth:`verl.serving.session.Session.pause`."""
        self.loop.call_soon_threadsafe(self.router.pause)

    def interrupt(self) -> None:
        """See :meth:`verl.serving.session.Session.interrupt`; in the event loop, await that of the router."""
        asyncio.run_coroutine_threadsafe(self.router.interrupt(), self.loop).result()

    def resume(self) -> None:
        """See :meth:`verl.serving.session.Session.resume`."""
        self.loop.call_soon_threadsafe(self.router.resume)

    def abort(self) -> None:
        """See :meth:`verl.serving.session.Session.abort`."""
        self.loop.call_soon_threadsafe(self.router.abort)

    def state(self) -> SessionState:
        """See :meth:`verl.serving.session.Session.state`."""
        return self.router.state()

    @property
    def weight_version(self) -> int:
        """See :meth:`verl.serving.session.Session.weight_version`."""
        return self.router.weight_version

    def close(self) -> None:
        """See :meth:`verl.serving.session.Session.close`."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.router.close)
