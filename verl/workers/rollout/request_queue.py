"""Requests that reach a rollout engine one by one, while it runs, instead of as one batch.

::

    queue = RequestQueue(on_answer)              # filled from any thread
    queue.put(7, RolloutRequest(...))            # 7: its request_id, chosen by the caller
    rollout.serve(queue)                         # in the engine's thread; calls on_answer(7, RolloutOutput(...))
    queue.cancel(7)                              # no longer wanted: there is room for another at once
    queue.close()                                # `serve` answers what it has taken, and returns
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from verl.errors import RolloutError
from verl.workers.rollout.request import NO_WEIGHTS, DrawnPart, RolloutOutput, RolloutRequest

Answer = RolloutOutput | RolloutError
"""Result of a request: a response, or the reason why this request cannot be served."""

STREAM_EVERY_S = 0.05
"""Seconds between two parts of a response that streams: one for each token would cost too much."""
_SIGNALS_S = 1.0  # how long a handler of a signal may be held up by the main thread's wait


class RequestQueue:
    """The requests to one engine and the way back of its answers. All methods may be called from any thread.

    Args:
        on_answer: called once with the id and the answer of each request that was neither cancelled nor left when
            the queue was closed, and before that with parts of the response if the request streams; in the thread of
            the engine, or of :meth:`interrupt`, so it must return at once.
    """

    def __init__(self, on_answer: Callable[[int, Answer | DrawnPart], object]) -> None:
        self._on_answer = on_answer
        self._waiting: deque[tuple[int, RolloutRequest]] = deque()
        self._running: set[int] = set()
        self._cancelled: set[int] = set()
        self._is_closed = False
        self._listener: Callable[[], object] | None = None
        self.on_abort: Callable[[], object] | None = None
        """Called by :meth:`abort`: :meth:`BaseRollout.abort` of the engine."""
        self._changed = threading.Condition()

    # ---- those who ask

    def put(self, request_id: int, request: RolloutRequest) -> None:
        """Add a request under an id that no other request of this queue has.

        Raises:
            RolloutError: the queue is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RolloutError("the rollout has ended, so its engine takes no more requests.")
            self._waiting.append((request_id, request))
            self._changed.notify()
        self._notify_listener()

    def cancel(self, request_id: int) -> None:
        """Withdraw a request. It gets no answer, also if the engine is at work on it; unknown ids are ignored."""
        with self._changed:
            if request_id in self._running:
                self._running.discard(request_id)
                self._cancelled.add(request_id)
            else:
                self._waiting = deque(pair for pair in self._waiting if pair[0] != request_id)
        self._notify_listener()

    def abort(self) -> None:
        """Let the engine answer its running requests with the tokens drawn so far; requests that wait stay."""
        if self.on_abort is not None:
            self.on_abort()

    def interrupt(self) -> None:
        """Abort as :meth:`abort` does, and answer the requests that the engine has not begun, without tokens."""
        with self._changed:
            unstarted, self._waiting = self._waiting, deque()
        for request_id, _ in unstarted:
            self._on_answer(request_id, RolloutOutput([], [], "abort", NO_WEIGHTS))
        self.abort()

    def close(self) -> None:
        """Make :meth:`BaseRollout.serve` return once it has answered its running requests. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()
        self._notify_listener()

    # ---- the engine

    def wait(self) -> bool:
        """Wait until a request waits to be taken; False if the queue is closed, and so none will come."""
        with self._changed:
            # A signal that came just before the wait, or to another thread, does not end it, and has its handler run
            # only when the wait is over.
            while not self._changed.wait_for(lambda: self._waiting or self._is_closed, _SIGNALS_S):
                continue
            return bool(self._waiting)

    def take(self, room: int | None = None, wait: bool = False) -> list[tuple[int, RolloutRequest]]:
        """Take up to ``room`` requests, the oldest first.

        Args:
            room: at least 0; None takes all.
            wait: if there is none, wait for one or for :meth:`close`, which gives an empty list.
        """
        if wait:
            self.wait()
        with self._changed:
            count = len(self._waiting) if room is None else min(room, len(self._waiting))
            requests = [self._waiting.popleft() for _ in range(count)]
            self._running.update(request_id for request_id, _ in requests)
            return requests

    def take_cancelled(self) -> set[int]:
        """Return the taken requests cancelled since the last call; the engine drops them without an answer."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled

    def answer_part(self, request_id: int, part: DrawnPart) -> None:
        """Pass on a part of the response to a running request; ignored if it was cancelled."""
        with self._changed:
            if request_id not in self._running:
                return
        self._on_answer(request_id, part)

    def answer(self, request_id: int, answer: Answer) -> None:
        """Answer a running request; ignored if it was cancelled."""
        with self._changed:
            if request_id not in self._running:
                return
            self._running.discard(request_id)
        self._on_answer(request_id, answer)

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call ``listener`` after each :meth:`put`, :meth:`cancel` and :meth:`close`, in the thread that calls them."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def _notify_listener(self) -> None:
        listener = self._listener
        if listener is not None:
            listener()

    @property
    def waiting(self) -> int:
        """Number of requests that were not taken yet."""
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._is_closed


class EngineRequests(Protocol):
    """The requests of a rollout, as every rank gets them; travels to the ranks."""

    def open_queue(self, engine_index: int, weight_version: int) -> AbstractContextManager[RequestQueue]:
        """Open the requests to one engine, which is awake with weights of this version.

        Engines are counted from 0 in the order of their leading ranks.
        """
        ...
