"""Agent loops in processes of their own, for ``trainer.controller=ray``.

::

    driver ── trajectories ──► worker 0 … worker n     one actor each; trajectories in threads
                                   │ requests
                                   ▼
                                router                 one actor; sticky, least loaded
                                   │ fetched by the ranks
                                   ▼
                                engine 0 … engine m    the ranks' rollout engines

Tokens stay with the worker that ran a trajectory. At the end of a rollout it pads them to columns, which lie in Ray's
object store as those of the ranks do (:mod:`verl.protocol.stored`); the driver learns how each trajectory ended.

A worker that dies, or gives no sign of life for ``rollout.agent.hang_timeout_s``, is replaced, and its trajectories are
run again from their beginning with the same random numbers, also those that had ended
(:mod:`verl.agents.ray_trajectories`). A router that does so is lost with the ranks, as a rank is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from verl.agents.columns import Ended, SequenceColumns
from verl.agents.outputs import without_tokens
from verl.agents.ray_trajectories import RunningTrajectories, shared_of
from verl.agents.slots import SlotTable, count_by
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.base.import_utils import prepare_process
from verl.config import PPOConfig
from verl.errors import ProcessLostError, RolloutError, WorkerError
from verl.protocol import DataProto
from verl.serving.router import RolloutEndedError, Router
from verl.serving.sent_images import ImageReceiver, ImageSender
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.watched_actor import ActorSilentError, WatchedActor
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import Answer, RequestQueue

logger = logging.getLogger(__name__)

Command = tuple[str, int, RolloutRequest | None]
"""``put`` with a request, ``cancel`` or ``close``, for an engine."""

LONG_POLL_S = 1.0
"""How long a rank's question for new requests is held back if there are none."""


class _Mailbox:
    """Commands for one engine, until its rank fetches them."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._arrived = asyncio.Event()
        self.was_asked = asyncio.Event()

    def put(self, number: int, request: RolloutRequest) -> None:
        self._add(("put", number, request))

    def cancel(self, number: int) -> None:
        self._add(("cancel", number, None))

    def close(self) -> None:
        self._add(("close", 0, None))

    def _add(self, command: Command) -> None:
        self._commands.append(command)
        self._arrived.set()

    async def fetch(self) -> list[Command]:
        self.was_asked.set()
        try:
            await asyncio.wait_for(self._arrived.wait(), LONG_POLL_S)
        except TimeoutError:
            return []
        self._arrived.clear()
        commands, self._commands = self._commands, []
        return commands


class RouterActor:
    """The router of a run, as a Ray actor; one rollout after the other."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._rollout = 0
        self._mailboxes: list[_Mailbox] = []
        self._router: Router | None = None
        self._streams: dict[str, asyncio.Queue[DrawnPart | None]] = {}
        """Parts of responses that stream, which :meth:`parts` gives; None after the last."""
        self._slots = SlotTable()

    async def open(self, engines: int) -> int:
        """Begin a rollout with so many engines; return its number."""
        self._rollout += 1
        self._mailboxes = [_Mailbox() for _ in range(engines)]
        self._router = Router(self._mailboxes, self._room)
        return self._rollout

    async def close(self) -> None:
        """End the rollout."""
        if self._router is not None:
            self._router.close()

    async def generate(self, conversation: str, request: RolloutRequest, stream: str | None = None) -> RolloutOutput:
        """See :meth:`Router.generate`. Its parts are kept under the name ``stream``, for :meth:`parts`."""
        if self._router is None:
            raise RolloutEndedError("no rollout is running, so no engine answers.")
        if stream is None:
            return await self._router.generate(conversation, request)
        told = self._streams[stream] = asyncio.Queue()
        try:
            return await self._router.generate(conversation, request, told.put_nowait)
        finally:
            told.put_nowait(None)
            del self._streams[stream]

    async def parts(self, stream: str) -> list[DrawnPart]:
        """Wait for parts of a response that streams, and return those there are; none after its end."""
        told = self._streams.get(stream)
        first = None if told is None else await told.get()
        if told is None or first is None:
            return []
        found = [first]
        while not told.empty() and (part := told.get_nowait()) is not None:
            found.append(part)
        return found

    async def take_slot(self, tool: str, number: int, call: str, process: str) -> None:
        """See :meth:`SlotTable.take`."""
        await self._slots.take(tool, number, call, process)

    async def give_slot(self, tool: str, call: str) -> None:
        """See :meth:`SlotTable.give`."""
        self._slots.give(tool, call)

    async def lose_process(self, process: str) -> None:
        """See :meth:`SlotTable.lose`."""
        self._slots.lose(process)

    async def silent_s(self) -> float:
        """See :meth:`Router.silent_s`."""
        return 0.0 if self._router is None else self._router.silent_s()

    async def engines_ask(self) -> bool:
        """Whether all engines are awake and ask for requests; waits for it for at most ``LONG_POLL_S`` seconds."""
        try:
            await asyncio.wait_for(asyncio.gather(*(box.was_asked.wait() for box in self._mailboxes)), LONG_POLL_S)
        except TimeoutError:
            return False
        return True

    async def fetch(self, rollout: int, engine: int) -> list[Command]:
        """Return what is new for an engine, after at most ``LONG_POLL_S`` seconds."""
        return await self._mailboxes[engine].fetch() if rollout == self._rollout else [("close", 0, None)]

    async def take_answers(self, rollout: int, answers: Sequence[tuple[int, Answer | DrawnPart]]) -> None:
        """Pass answers of an engine on."""
        if rollout == self._rollout and self._router is not None:
            for number, answer in answers:
                self._router.take_answer(number, answer)


class RayRequests:
    """The requests to the engines of the ranks; see :class:`verl.workers.rollout.request_queue.EngineRequests`."""

    def __init__(self, router: Any, rollout: int) -> None:
        self._router, self._rollout = router, rollout

    @contextmanager
    def of_engine(self, number: int) -> Iterator[RequestQueue]:
        """Yield a queue that a thread fills with what the router has for the engine."""
        queue = RequestQueue(
            lambda request, answer: self._router.take_answers.remote(self._rollout, [(request, answer)])
        )
        thread = threading.Thread(target=self._fill, args=(queue, number), name="requests", daemon=True)
        thread.start()
        try:
            yield queue
        finally:
            queue.close()
            thread.join()

    def _fill(self, queue: RequestQueue, engine: int) -> None:
        images = ImageReceiver(_pixels)
        try:
            while not queue.is_closed:
                self._obey(queue, images, ray.get(self._router.fetch.remote(self._rollout, engine)))
        except RayError as error:  # the router is gone: the driver learns it too, and says so
            logger.warning("the router of agent loops does not answer: %s", error)
            queue.close()

    # A function of its own, so that no variable keeps references to images until the next command comes.
    def _obey(self, queue: RequestQueue, images: ImageReceiver, commands: Sequence[Command]) -> None:
        for what, number, request in commands:
            if what == "put" and request is not None:
                try:
                    queue.put(number, images.opened(request))
                except RolloutError as error:
                    self._router.take_answers.remote(self._rollout, [(number, error)])
            elif what == "cancel":
                queue.cancel(number)
            else:
                queue.close()


def generating(
    router: Any, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None
) -> Any:
    """Send a request to a :class:`RouterActor`, and return the reference of its answer.

    A thread calls ``on_part`` with parts of a response that streams.
    """
    if on_part is None:
        return router.generate.remote(conversation, request)
    stream = uuid.uuid4().hex
    reference = router.generate.remote(conversation, request, stream)

    def tell() -> None:
        with suppress(RayError):  # what goes wrong is told by the answer; here it only ends the stream
            while parts := ray.get(router.parts.remote(stream)):
                for part in parts:
                    on_part(part)

    threading.Thread(target=tell, name="streamed tokens", daemon=True).start()
    return reference


def _stored(pixels: np.ndarray) -> Any:
    try:
        return ray.put(pixels)
    except RayError as error:
        raise RolloutError(
            f"an image of {pixels.nbytes:,} bytes found no room in Ray's object store, nor on the disk to which that "
            f"moves what it cannot hold ({type(error).__name__}). Give the disk of Ray's temporary folder more room, "
            "or set rollout.agent.max_concurrent lower."
        ) from error


def _pixels(reference: Any) -> np.ndarray:
    try:
        return ray.get(reference)
    except RayError as error:
        raise LookupError(type(error).__name__) from error


class RayCall:
    """A request under way; see :class:`verl.agents.servers.GenerationCall`."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def future(self) -> Future[RolloutOutput]:
        """Return what becomes of it."""
        return self._reference.future()

    def cancel(self) -> None:
        """Withdraw it."""
        ray.cancel(self._reference)


class RayConnection:
    """The way to a :class:`RouterActor`; see :class:`verl.agents.servers.Connection`."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self.images = ImageSender(_stored)
        """The images of all conversations of this process."""

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> RayCall:
        """Send a request of a conversation."""
        sent = self.images.sent(conversation, request)
        return RayCall(generating(self._router, conversation, sent, on_part))

    def end(self, conversation: str) -> None:
        """Free the images that only this conversation had."""
        self.images.end(conversation)


class RaySlots:
    """At most ``number`` calls of a tool at once in all processes of a run, on all machines.

    The router counts them, by a message before a call and one after it.
    """

    def __init__(self, router: Any, process: str, tool: str, number: int) -> None:
        self._router, self._process, self._tool, self._number = router, process, tool, number

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        call = uuid.uuid4().hex
        asked = self._router.take_slot.remote(self._tool, self._number, call, self._process)
        try:
            await asyncio.wrap_future(asked.future())
            yield
        finally:
            self._router.give_slot.remote(self._tool, call)


class WorkerActor:
    """An :class:`AgentLoopWorker` in a process of its own, which ``process`` names."""

    def __init__(self, config: PPOConfig, router: Any, process: str, import_path: Sequence[str]) -> None:
        # Agent loops live where the driver finds them.
        sys.path.extend(path for path in import_path if path not in sys.path)
        prepare_process()
        model = config.actor_rollout_ref.model
        path, trusts = model.tokenizer_path or model.path, model.trust_remote_code
        tokenizer = hf_tokenizer(path, trust_remote_code=trusts, chat_template=model.custom_chat_template)
        processor = hf_processor(path, trust_remote_code=trusts)
        count_by(partial(RaySlots, router, process))
        self._worker = AgentLoopWorker(config, tokenizer, processor, RayConnection(router))
        self._columns = SequenceColumns(config.actor_rollout_ref.rollout, tokenizer, processor)
        self._ended: dict[int, Ended] = {}

    async def run(self, number: int, trajectory: Trajectory) -> TrajectoryResult:
        """Run a trajectory to its end; its tokens stay here under its number until :meth:`hand_in`."""
        # Where they lie on another machine they take time, and this thread serves other trajectories too.
        await asyncio.gather(*(asyncio.to_thread(value.arrays) for value in shared_of(trajectory)))
        result = await self._worker.run(trajectory)
        self._ended[number] = trajectory, result
        return replace(result, outputs=tuple(map(without_tokens, result.outputs)))

    async def hand_in(self, numbers: Sequence[int]) -> DataProto:
        """Return the columns of trajectories that have ended, in the order of the numbers, and forget them."""
        return self._columns.of([self._ended.pop(number) for number in numbers])

    async def abandoned(self) -> int:
        """Return the number of threads that do not end."""
        return self._worker.abandoned


class RayAgents:
    """Runs trajectories in Ray actors, which start with the first rollout and stay for the run.

    Args:
        config: the whole configuration.
        columns: makes the columns of trajectories that no process could run to their end.
    """

    def __init__(self, config: PPOConfig, columns: SequenceColumns) -> None:
        self._config, self._columns = config, columns
        self._workers: list[WatchedActor] = []
        self._router: WatchedActor | None = None
        self._processes: dict[WatchedActor, str] = {}
        """The name of each worker's process."""

    def run(self, trajectories: Sequence[Trajectory], group: Any) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`.

        Raises:
            ProcessLostError: a rank or the router died or hangs.
            WorkerError: an engine failed, or a process of agent loops cannot start.
        """
        try:
            return self._run(trajectories, group)
        except RayActorError as error:
            raise ProcessLostError(f"the router of agent loops died: {brief(str(error))}") from error

    def _run(self, trajectories: Sequence[Trajectory], group: Any) -> tuple[list[TrajectoryResult], DataProto]:
        with ExitStack() as on_failure:
            on_failure.callback(self.shutdown)  # neither the ranks nor the trajectories may go on
            router = self._started_router()
            engines = len(group.mesh("rollout").collecting_ranks)
            rollout: int = router.result(router.actor.open.remote(engines))
            serving = group.serve(RayRequests(router.actor, rollout))
            running = self._ran(trajectories, group, serving, router)
            router.result(router.actor.close.remote())
            group.wait_for(serving)
            self._replace_stuck_workers()
            on_failure.pop_all()
        return running.results, running.columns

    def _ran(
        self, trajectories: Sequence[Trajectory], group: Any, serving: Any, router: WatchedActor
    ) -> RunningTrajectories:
        settings = self._config.actor_rollout_ref.rollout
        running = RunningTrajectories(settings, self._columns, trajectories, self._workers, self._replacement)
        while not running.look():
            if group.any_returned(serving):
                group.wait_for(serving)  # raises why the ranks ended before their time
                router.result(router.actor.silent_s.remote())  # raises if it was because the router died
                raise WorkerError("the rollout engines ended while trajectories still ran.")
            silent_s, limit_s = router.look(), group.hang_timeout_s
            if limit_s is not None and silent_s is not None and silent_s > limit_s:
                raise group.end_hanging(serving)
        return running

    def _started_router(self) -> WatchedActor:
        if self._router is None:
            rollout = self._config.actor_rollout_ref.rollout
            limit_s = rollout.agent.hang_timeout_s
            self._router = WatchedActor(
                "the router of agent loops", RouterActor, "silent_s", limit_s, rollout.max_num_seqs
            )
            cores = int(ray.cluster_resources().get("CPU", 1))
            self._workers = [self._new_worker() for _ in range(max(1, min(rollout.agent.num_workers, cores)))]
        return self._router

    def _new_worker(self) -> WatchedActor:
        assert self._router is not None
        limit_s = self._config.actor_rollout_ref.rollout.agent.hang_timeout_s
        process = uuid.uuid4().hex
        arguments = self._config, self._router.actor, process, sys.path
        worker = WatchedActor("a process of agent loops", WorkerActor, "abandoned", limit_s, *arguments)
        self._processes[worker] = process
        return worker

    def _replacement(self, worker: WatchedActor) -> WatchedActor:
        """End a worker, give back the slots of tools that it holds, and start another one."""
        assert self._router is not None
        worker.end()
        self._router.actor.lose_process.remote(self._processes.pop(worker))
        return self._new_worker()

    def _replace_stuck_workers(self) -> None:
        asked = [worker.actor.abandoned.remote() for worker in self._workers]
        for slot, (worker, reference) in enumerate(zip(list(self._workers), asked, strict=True)):
            try:
                count = worker.result(reference)
            except (ActorSilentError, RayActorError) as error:
                logger.warning("a process of agent loops is replaced: %s", brief(str(error)))
            else:
                if not count:
                    continue
                logger.warning("%d agent loop(s) do not end; their process is replaced", count)
            self._workers[slot] = self._replacement(worker)

    def shutdown(self) -> None:
        """End all processes. A later :meth:`run` starts new ones."""
        workers, router, self._workers, self._router = self._workers, self._router, [], None
        self._processes.clear()
        if ray.is_initialized():
            for actor in [*workers, *([router] if router else [])]:
                actor.end()
