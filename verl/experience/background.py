"""Sampling in a thread beside the one that trains, for rollout engines with a pool of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from verl.errors import ProcessLostError, RolloutError
from verl.protocol import DataProto
from verl.utils.metric import Metrics

T = TypeVar("T")

CLOSED = "this sampling is not needed any more, because the workers have ended"


class SerialThread:
    """Runs calls one after the other in a thread that does not keep the program from ending.

    The threads of ``concurrent.futures`` are waited for when a program ends; a call that waits for scores would hold
    up Ctrl-C.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._has_started = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` after all calls that were submitted before it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again where it is waited for
                future.set_exception(error)

        self._calls.put(run)
        if not self._has_started:
            self._has_started = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """End the thread after all calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


class PromptsTakenFirst:
    """Takes prompts from the data before the thread that samples asks for them.

    The position of the data then counts them from the moment when their sampling begins.

    Args:
        take: takes the next batch of prompts.
    """

    def __init__(self, take: Callable[[], DataProto]) -> None:
        self._take = take
        self._prompts: deque[DataProto] = deque()
        self._is_closed = False

    def take(self) -> None:
        """Take a batch, which a later call of this object returns."""
        self._prompts.append(self._take())

    def __call__(self) -> DataProto:
        """Return the oldest batch that was taken, else take one.

        Raises:
            RolloutError: :meth:`close` was called.
        """
        if self._is_closed:
            raise RolloutError(CLOSED)
        return self._prompts.popleft() if self._prompts else self._take()

    def close(self) -> None:
        """Take no prompts any more."""
        self._is_closed = True


class RolloutPool:
    """Rollout engines on ranks of their own, as a source of experience uses them.

    Args:
        thread: samples.
        prompts: of the source that samples.
        takes_prompts_first: whether a batch is one batch of prompts, as it is without dynamic sampling.
        send_weights: sends the newest weights of the policy, which have this number of updates, to the engines; called
            while both are at rest.
        replace: starts the engines anew if what this error reports lost them alone, in any thread; raises it if not.
    """

    def __init__(
        self,
        thread: SerialThread,
        prompts: PromptsTakenFirst,
        takes_prompts_first: bool,
        send_weights: Callable[[int], Metrics],
        replace: Callable[[ProcessLostError], None],
    ) -> None:
        self.thread, self.prompts, self.takes_prompts_first = thread, prompts, takes_prompts_first
        self._send_weights, self._replace = send_weights, replace
        self._version: int | None = None
        self.is_starting = False
        """True while engines are being restarted."""

    def update(self, version: int) -> Metrics:
        """Send the weights after ``version`` updates of the policy, unless the engines have them.

        Engines that are lost meanwhile are replaced.
        """
        metrics: Metrics = {}
        while version != self._version:
            try:
                metrics = self._send_weights(version)
                self._version = version
            except ProcessLostError as error:
                self.replace(error)
        return metrics

    def replace(self, error: ProcessLostError) -> None:
        """Start the engines anew, which then need :meth:`update`.

        Raises:
            ProcessLostError: the error itself, if others than the engines are lost, or they were lost too often.
        """
        self.is_starting = True
        try:
            self._replace(error)
        finally:
            self.is_starting = False
        self._version = None
