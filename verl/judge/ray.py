"""The engines of a judge on ranks of Ray, for ``trainer.controller=ray``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from verl.agents.ray import RayCall, RayRequests, RouterActor, generating
from verl.agents.ray_trajectories import LOOK_S
from verl.errors import EngineLostError, ProcessLostError, WorkerError
from verl.judge.local import ASLEEP, waiting
from verl.serving.router import RolloutEndedError
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.watched_actor import light_actor
from verl.utils.deferred import Deferred
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest

T = TypeVar("T")


class _JudgeCall(RayCall):
    """A request whose loss, with the router's process, is an error of the rollout."""

    def future(self) -> Future[RolloutOutput]:
        outcome: Future[RolloutOutput] = Future()

        def take(done: Future[RolloutOutput]) -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            elif isinstance(error, RayActorError):
                outcome.set_exception(EngineLostError("the processes of the judge have ended."))
            else:
                outcome.set_exception(error)

        super().future().add_done_callback(take)
        return outcome


class RayEngines:
    """The engines of all ranks of the judge, behind a router in a process of its own.

    Args:
        room: most requests that one engine runs at once.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._router: Any = None

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> RayCall:
        """See :class:`verl.agents.servers.Connection`."""
        router = self._router
        if router is None:
            raise RolloutEndedError(ASLEEP)
        return _JudgeCall(generating(router, conversation, request, on_part))

    def end(self, conversation: str) -> None:
        """Do nothing: a judge reads texts, and nothing is kept for further turns."""

    def serve_while(self, group: Any, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """See :meth:`verl.judge.service.Engines.serve_while`.

        Raises:
            ProcessLostError: a rank or the router died, or a rank hangs.
            WorkerError: an engine failed.
        """
        with self._forgotten_on_failure():
            if self._router is None:
                self._router = light_actor(RouterActor).remote(self._room)
            rollout: Any = ray.get(self._router.open.remote(len(group.mesh("rollout").collecting_ranks)))
            serving = group.serve(RayRequests(self._router, rollout))
            began = time.monotonic()
            while not ray.get(self._router.engines_ask.remote()):
                self._check_ranks(group, serving, time.monotonic() - began)
            outcome = waiting(start(), lambda: None)
        return Deferred([outcome], lambda: self._result(outcome, group, serving))

    def _result(self, outcome: Future[T], group: Any, serving: Any) -> T:
        with self._forgotten_on_failure():
            while not wait_for_futures([outcome], LOOK_S).done:
                self._check_ranks(group, serving, ray.get(self._router.silent_s.remote()))
            ray.get(self._router.close.remote())
            group.wait_for(serving)
        return outcome.result()

    def _check_ranks(self, group: Any, serving: Any, silent_s: float) -> None:
        """Raise if a rank has ended, or if one has been silent for too long."""
        if group.any_returned(serving):
            group.wait_for(serving)  # raises why the ranks ended before their time
            ray.get(self._router.silent_s.remote())  # raises if it was because the router died
            raise WorkerError("the judge's engines ended while rewards were still computed.")
        if group.hang_timeout_s is not None and silent_s > group.hang_timeout_s:
            raise group.end_hanging(serving)

    @contextmanager
    def _forgotten_on_failure(self) -> Iterator[None]:
        with ExitStack() as on_failure:
            on_failure.callback(self.forget)
            try:
                yield
            except RayActorError as error:
                raise ProcessLostError(f"the router of the judge died: {brief(str(error))}") from error
            on_failure.pop_all()

    def forget(self) -> None:
        """See :meth:`verl.judge.service.Engines.forget`."""
        router, self._router = self._router, None
        if router is not None:
            ray.kill(router)
