"""The client through which a rollout drives vLLM or SGLang, each of which runs as an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import ClassVar

from torch import Tensor

from verl.base.env import LAUNCHER_VARIABLES
from verl.errors import EngineLostError, RolloutError
from verl.workers.rollout import engine_side
from verl.workers.rollout.engine_kwargs import Launch
from verl.workers.rollout.engine_process import EngineProcess, ProcessesElsewhere, new_token
from verl.workers.rollout.engine_side.verl_engine import TOKEN_VARIABLE
from verl.workers.rollout.request import DrawnPart, FinishReason, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import STREAM_EVERY_S, RequestQueue
from verl.workers.rollout.scoring import ScoreRequest, TokenScores
from verl.workers.rollout.state import fields_of, samples_of
from verl.workers.rollout.weights import SharedPart

MEMORY = ("kv_cache", "weights")
"""The parts of an engine's memory that can be released and allocated separately."""
ENGINE_SIDE = Path(engine_side.__file__).parent
"""Folder that is put on the module path of the engines' processes."""
_POLL_S = 0.1
"""Seconds between checks of the event that aborts requests, which wakes no event loop."""


@dataclass
class PartialResponse:
    """A request to an engine, and the tokens drawn for it so far."""

    request: RolloutRequest
    params: dict[str, object]
    """The sampling parameters in the engine's own format."""
    is_end: Callable[[list[int]], bool] | None = None
    """Returns whether the last of the given tokens ends the response; None if the engine itself detects every end."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the response."""
    has_adapters: bool = False
    """Draw with the adapters that :meth:`EngineClient.load_adapters` brought."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_ids: list[array[int]] = field(default_factory=list)
    """The ids that truncated sampling kept for each, ascending, of a request that asks for them."""
    finish_reason: FinishReason = "abort"
    is_done: bool = False
    """The response has ended, or the engine aborted it."""
    num_preempted: int | None = None
    """Number of times that the engine preempted it for lack of memory; None if the engine does not report it."""
    streamed: int = 0
    """Number of tokens that were already passed on in parts, of a request that streams."""
    streamed_at: float = -math.inf

    def take(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        finish_reason: str | None,
        kept_ids: Sequence[Collection[int]] = (),
    ) -> bool:
        """Append tokens from the engine; return whether the response is done. Tokens after an end are dropped.

        Raises:
            RolloutError: the engine drew a token that is none of those that it kept.
        """
        kept_by_token = kept_ids or [()] * len(token_ids)
        for token, log_prob, token_kept_ids in zip(token_ids, log_probs, kept_by_token, strict=True):
            if kept_ids and token not in token_kept_ids and math.isfinite(log_prob):
                raise RolloutError(f"the engine drew token {token}, and says that it kept {sorted(token_kept_ids)}.")
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            self.kept_ids.append(array("i", sorted(token_kept_ids)))  # a list would take ten times the memory
            if self.is_end is not None and self.is_end(self.token_ids):
                self.finish_reason = "stop"
                self.is_done = True
                return True
        # An engine may report "abort" even if the abort came after the last token.
        if finish_reason == "abort" and self.token_ids and self.token_ids[-1] in self.end_ids:
            finish_reason = "stop"
        if finish_reason == "abort" and len(self.token_ids) == self.request.sampling.max_tokens:
            finish_reason = "length"
        if finish_reason == "stop" or finish_reason == "length":
            self.finish_reason = finish_reason
        self.is_done = finish_reason is not None
        return self.is_done


class PendingRequests:
    """The requests of a queue in an engine's own format; those that a lost engine did not answer are given out again.

    Args:
        queue: where they come from.
        room: largest number of requests that the engine is given at once.
        check: raises RolloutError if a request cannot be served, which is then its answer.
        partial: translates a request into the engine's format.
        output: makes the answer of a response.
    """

    def __init__(
        self,
        queue: RequestQueue,
        room: int,
        check: Callable[[RolloutRequest], None],
        partial: Callable[[RolloutRequest], PartialResponse],
        output: Callable[[PartialResponse], RolloutOutput],
    ) -> None:
        self._queue, self._room = queue, room
        self._check, self._partial, self._output = check, partial, output
        self._unanswered: dict[int, RolloutRequest] = {}
        self._again: list[int] = []
        """Unanswered requests of an engine that was lost."""
        self.has_progress = False
        """True if a response came since the start or the last :meth:`repeat`."""

    def wait(self) -> bool:
        """Wait until there is a request; False if the queue is closed and all that were taken are answered."""
        return bool(self._unanswered) or self._queue.wait()

    def repeat(self) -> None:
        """Queue all unanswered requests again."""
        self._again, self.has_progress = list(self._unanswered), False

    def take(self) -> list[tuple[int, PartialResponse]]:
        """Take the requests that have come, as many as there is room for; an unservable one is answered here."""
        request_ids, self._again = self._again, []
        for request_id, request in self._queue.take(self._room - len(self._unanswered)):
            try:
                self._check(request)
            except RolloutError as error:
                self._queue.answer(request_id, error)
                continue
            self._unanswered[request_id] = request
            request_ids.append(request_id)
        return [(request_id, self._partial(self._unanswered[request_id])) for request_id in request_ids]

    def take_cancelled(self) -> set[int]:
        """Return the requests that were cancelled since the last call; the engine drops them."""
        cancelled = self._queue.take_cancelled()
        for request_id in cancelled:
            self._unanswered.pop(request_id, None)
        self._again = [request_id for request_id in self._again if request_id not in cancelled]
        return cancelled

    def answer_part(self, request_id: int, response: PartialResponse) -> None:
        """Pass on the tokens that have come since the last part, if the request streams."""
        now, new = time.monotonic(), response.token_ids[response.streamed :]
        if response.request.streams and new and now - response.streamed_at >= STREAM_EVERY_S:
            self._queue.answer_part(request_id, DrawnPart(response.streamed, new))
            response.streamed, response.streamed_at = len(response.token_ids), now

    def answer(self, request_id: int, response: PartialResponse) -> None:
        """Answer a request with its response."""
        output = self._output(response)
        del self._unanswered[request_id]
        self.has_progress = True
        self._queue.answer(request_id, output)

    def refuse(self, request_id: int, error: RolloutError) -> None:
        """Answer a request with the reason why it cannot be served."""
        del self._unanswered[request_id]
        self._queue.answer(request_id, error)

    def refuse_all(self, error: RolloutError) -> None:
        """Answer all requests, also those that still come, with an error, until the queue is closed."""
        for request_id in list(self._unanswered):
            self.refuse(request_id, error)
        while self._queue.wait():
            for request_id, _ in self._queue.take():
                self._queue.answer(request_id, error)

    def listening(self, listener: Callable[[], object]) -> AbstractContextManager[None]:
        """See :meth:`RequestQueue.listening`."""
        return self._queue.listening(listener)


async def ask_each(
    requests: PendingRequests,
    ask: Callable[[int, PartialResponse], Coroutine[object, object, None]],
    aborted: Event,
    *,
    cancel: Callable[[int], Coroutine[object, object, object]] | None = None,
    abort_all: Callable[[], Coroutine[object, object, object]] | None = None,
) -> None:
    """Ask an engine for each request by itself as soon as it comes, until there is none.

    Args:
        requests: what to ask.
        ask: draws the tokens of one response; raises RolloutError if the engine refuses this request. It is cancelled
            with its request.
        aborted: once set, no more requests are taken.
        cancel: makes the engine drop a request, if cancelling ``ask`` does not.
        abort_all: makes the engine end all requests it has; called repeatedly once ``aborted`` is set.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    tasks: dict[int, tuple[asyncio.Task[None], PartialResponse]] = {}
    with requests.listening(lambda: loop.call_soon_threadsafe(changed.set)):
        try:
            while True:
                changed.clear()
                for request_id in requests.take_cancelled() & tasks.keys():
                    if cancel is not None:
                        await cancel(request_id)
                    tasks.pop(request_id)[0].cancel()
                for request_id, response in [] if aborted.is_set() else requests.take():
                    task = loop.create_task(ask(request_id, response))
                    task.add_done_callback(lambda _: changed.set())
                    tasks[request_id] = task, response
                for request_id in [request_id for request_id, (task, _) in tasks.items() if task.done()]:
                    task, response = tasks.pop(request_id)
                    error = task.exception()
                    if error is None:
                        requests.answer(request_id, response)
                    elif isinstance(error, RolloutError) and not isinstance(error, EngineLostError):
                        requests.refuse(request_id, error)
                    else:
                        raise error
                    changed.set()  # there is room for another one
                if not tasks and not changed.is_set():
                    return
                if aborted.is_set() and abort_all is not None:
                    await abort_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await changed.wait()
        finally:
            for task, _ in tasks.values():
                task.cancel()


def variables_of_engine(
    environment: Mapping[str, str], launch: Launch, devices: str | None, token: str
) -> dict[str, str | None]:
    """Return the environment variables of an engine's processes; see :class:`EngineClient`."""
    # The interpreter of another environment must not import modules of this one.
    inherited = os.environ.get("PYTHONPATH") if launch.python == sys.executable else None
    variables: dict[str, str | None] = {
        **dict.fromkeys(LAUNCHER_VARIABLES),  # of the rank that starts the server
        **environment,
        TOKEN_VARIABLE: token,
        # Programs of that environment, such as the ninja by which SGLang compiles kernels.
        "PATH": os.pathsep.join([str(Path(launch.python).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, [ENGINE_SIDE, inherited]))),
    }
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    return variables


def start_node(
    name: str,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    launch: Launch,
    devices: str | None,
) -> EngineProcess:
    """Start the processes of an engine on another machine than that of its server, and do not wait for them.

    The arguments are those of :class:`EngineClient`.
    """
    token = new_token()
    variables = variables_of_engine(environment, launch, devices, token)
    process = EngineProcess(name, command, token=token, environment=variables, health_path=None)
    process.start()
    return process


class EngineClient(ABC):
    """An engine that runs as an HTTP server in a separate process and ends with this object at the latest.

    Subclasses implement the calls in the format of one engine's server. All calls except :meth:`kill` may raise
    :class:`~verl.errors.EngineLostError`.

    Args:
        name: name of the engine, for messages.
        command: returns the command line for a given port.
        environment: variables that the server gets in addition to those of this process; the token is added here.
        launch: interpreter and time limits of the server.
        devices: ids of the GPUs that the server may use; None leaves CUDA_VISIBLE_DEVICES as it is.
        elsewhere: the engine's processes on other machines.

    Raises:
        RolloutError: the server does not start.
    """

    metrics: ClassVar[Mapping[str, str]]
    """Field of :class:`~verl.workers.rollout.state.EngineState` → the server's name for it at ``metrics_path``."""
    metrics_path: ClassVar[str] = "/metrics"

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        launch: Launch,
        devices: str | None = None,
        elsewhere: ProcessesElsewhere | None = None,
    ) -> None:
        token = new_token()
        self.server = EngineProcess(
            name,
            command,
            token=token,
            environment=variables_of_engine(environment, launch, devices, token),
            start_timeout_s=launch.start_timeout_s,
            hang_limits=launch.hang_limits,
            elsewhere=elsewhere,
            metrics=(self.metrics_path, tuple(self.metrics.values())),
        )
        self.server.start()

    @abstractmethod
    def generate(self, responses: Sequence[PartialResponse], aborted: Event) -> None:
        """Draw tokens until all responses are done; return soon after ``aborted`` is set."""

    @abstractmethod
    def serve(self, requests: PendingRequests, aborted: Event) -> None:
        """Answer requests, and those that come meanwhile, until there is none.

        After ``aborted`` is set, answer those that were taken with what there is, and return soon.
        """

    @abstractmethod
    def score(
        self,
        requests: Mapping[int, ScoreRequest],
        take: Callable[[int, TokenScores], object],
        *,
        unknown_ids: Sequence[int] = (),
        has_adapters: bool = False,
    ) -> None:
        """Compute the log-probs of given tokens.

        Args:
            requests: by a number of the caller's.
            take: called with the number and the scores of a request as soon as they are there, possibly in another
                thread, so that they are kept if the engine is lost later.
            unknown_ids: ids that have no share of the distribution.
            has_adapters: score with the adapters that :meth:`load_adapters` brought.
        """

    @abstractmethod
    def weights_devices(self) -> Sequence[str | None]:
        """Return the GPU of each of the engine's processes, see ``verl_engine.device_uuid``."""

    @abstractmethod
    def load_weights(self, parts: Iterable[SharedPart]) -> int:
        """Replace all weights, discard everything computed from the previous ones, and return the number of bytes.

        Args:
            parts: all weights of the model, in its dtype. Each part is checked before the next is asked for.

        Raises:
            RolloutError: they did not arrive as they were sent. The engine then holds no usable weights.
        """

    @abstractmethod
    def load_adapters(self, adapters: Mapping[str, Tensor]) -> int:
        """Replace the LoRA adapters, discard everything computed from the previous ones, and return their bytes.

        Args:
            adapters: as in :class:`~verl.workers.adapted_weights.AdaptedWeights`, in the model's dtype.

        Raises:
            RolloutError: they did not arrive as they were sent.
        """

    @abstractmethod
    def sleep(self, parts: Sequence[str]) -> None:
        """Release these parts of :data:`MEMORY`."""

    @abstractmethod
    def wake(self, parts: Sequence[str]) -> None:
        """Allocate these parts of :data:`MEMORY` again."""

    def statistics(self) -> Mapping[str, float]:
        """Return what the engine tells of itself, fields of :class:`~verl.workers.rollout.state.EngineState`.

        May be called by another thread while the engine works. The engine counts with ``rollout.prometheus.enable``.
        """
        return fields_of(samples_of(self.server.text(self.metrics_path), self.metrics.values()), self.metrics)

    def kill(self) -> Path | None:
        """End all processes of the engine, also after a crash; return a copy of its log, if any. Idempotent."""
        return self.server.kill()

    def close(self) -> None:
        """Stop the server gracefully. Without this call it stops when this object is garbage-collected."""
        self.server.stop()
