"""Ray actors whose code may stop, block or end them: watched, and ended with all that they have started."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from verl.errors import ProcessLostError
from verl.single_controller.ray.processes import end_workers, finished_of, on_nodes, processes_of
from verl.supervision.processes import MARK_VARIABLE, kill_marked, new_mark

logger = logging.getLogger(__name__)

START_S = 300.0
"""Time that an actor has to start: it imports torch, and reads the tokenizer and the tools."""
MAX_CALLS = 100_000
"""Most calls under way in one actor."""


def light_actor(cls: type, **options: object) -> Any:
    """Return the Ray actor class of a process that waits most of the time, and so takes no core from the ranks."""
    return ray.remote(cls).options(num_cpus=0, max_concurrency=MAX_CALLS, **options)


class ActorSilentError(ProcessLostError):
    """An actor gives no sign of life: it is stopped, or user code holds the lock of its interpreter."""


class WatchedActor:
    """An actor in a process of its own that is asked again and again whether it still answers.

    Args:
        title: what it is, for messages.
        cls: its class, whose methods are ``async``.
        question: the method that is called for a sign of life.
        limit_s: longest time without an answer, once it has started.
        *args: for its constructor.
    """

    def __init__(self, title: str, cls: type, question: str, limit_s: float, *args: object) -> None:
        self._title, self._question, self._limit_s = title, question, limit_s
        self._mark = new_mark()
        marked = light_actor(cls, runtime_env={"env_vars": {MARK_VARIABLE: self._mark}})
        self.actor: ActorHandle = marked.remote(*args)
        self._has_started = False
        self._answer: object = None
        self._ask()

    def poll(self) -> Any:
        """Return the newest answer to the question; None before the first.

        Raises:
            ActorSilentError: there is none for too long.
            RayActorError: the process died.
        """
        if finished_of([self._pending], 0, fetch_local=False):
            self._answer = self.result(self._pending)
            self._ask()
        elif time.monotonic() - self._asked_at > self._patience_s:
            raise self._silent()
        return self._answer

    def result(self, reference: ObjectRef) -> Any:
        """Return what a call of the actor that returns at once gives.

        Raises:
            ActorSilentError: there is no answer for too long.
            RayActorError: the process died.
        """
        try:
            answer = ray.get(reference, timeout=self._patience_s)
        except GetTimeoutError as error:
            raise self._silent() from error
        self._has_started = True
        return answer

    def end(self) -> None:
        """End the process, also if it is stopped, and all that its code has started on its node."""
        nodes = {process.node_id: [self._mark] for process in processes_of([self.actor]) if process.pid}
        end_workers([self.actor])
        try:
            on_nodes(kill_marked, nodes)
        except RayError as error:
            logger.warning("what %s has started may still run: %s", self._title, error)

    def _ask(self) -> None:
        self._pending = getattr(self.actor, self._question).remote()
        self._asked_at = time.monotonic()

    @property
    def _patience_s(self) -> float:
        return self._limit_s if self._has_started else max(START_S, self._limit_s)

    def _silent(self) -> ActorSilentError:
        while_it = "" if self._has_started else " while it started"
        return ActorSilentError(
            f"{self._title} has not answered for {self._patience_s:g} s{while_it}: it is stopped, or code in it holds "
            "Python's lock."
        )
