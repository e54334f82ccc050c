"""A session with the engines of ranks on Ray, for ``trainer.controller=ray``.

::

    process of conversations ─► router in it ◄─┐
    process of conversations ─► router in it ◄─┤ requests are fetched, answers are sent
    driver ─► router in an actor of its own  ◄─┴─ rank of engine 0 … engine n

Requests go to the ranks without another process between. A rank that serves answers no call, so a thread of it asks
every router for requests, and a router answers as soon as it has some. The driver's router is there in every session:
by it the ranks learn of the other routers, and of the end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from verl.errors import EngineLostError, ProcessLostError, RolloutError, WorkerError
from verl.serving.connection import LocalCall, LocalConnection
from verl.serving.router import ENDED, RolloutEndedError, Router
from verl.serving.sent_images import ImageReceiver, ImageSender
from verl.serving.state import SessionState, described, joined
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.watched_actor import ActorSilentError, WatchedActor
from verl.utils.deferred import Deferred
from verl.workers.rollout.request import NO_WEIGHTS, DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import Answer, RequestQueue

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from verl.single_controller.base.dispatch import PendingOutputs
    from verl.single_controller.base.worker_group import WorkerGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")

Command = tuple[str, int, Any]
"""``put`` with a request, ``cancel``, ``abort``, ``interrupt``, ``join`` with another router, or ``close``, for a rank.

The integer is the id of the request, or the index of the router.
"""
CHECK_S = 0.5
"""Seconds between the driver's checks of the ranks while engines serve."""
STATE_S = 5.0
"""Timeout of routers' reports of their state, in seconds."""
AWAKE_S = 1.0
"""Timeout of one wake-up poll, in seconds."""
ID_BITS = 40
"""Ids of the requests of a router count from its index times two to the power of this."""


class _Mailbox:
    """Commands for one engine, until its rank fetches them."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._arrived = asyncio.Event()
        self.was_asked = asyncio.Event()

    def put(self, request_id: int, request: RolloutRequest) -> None:
        self.add(("put", request_id, request))

    def cancel(self, request_id: int) -> None:
        self.add(("cancel", request_id, None))

    def abort(self) -> None:
        self.add(("abort", 0, None))

    def interrupt(self) -> None:
        self.add(("interrupt", 0, None))

    def close(self) -> None:
        self.add(("close", 0, None))

    def add(self, command: Command) -> None:
        self._commands.append(command)
        self._arrived.set()

    async def fetch(self) -> list[Command]:
        self.was_asked.set()
        await self._arrived.wait()
        self._arrived.clear()
        commands, self._commands = self._commands, []
        return commands


class RouterActor:
    """A router in a Ray actor: for requests of other processes, or a base class of actors that have their own.

    Args:
        room: most requests of this router that one engine has at once.
        ended: message of the error with which requests are refused while the engines sleep.
        index: number of the router, from 0.
    """

    def __init__(self, room: int, ended: str = ENDED, index: int = 0) -> None:
        self.router = Router(room, ended, index << ID_BITS)
        self._round = 0
        self._is_open = False
        self._opened = asyncio.Condition()
        self._mailboxes: list[_Mailbox] = []
        self._streams: dict[str, asyncio.Queue[DrawnPart | None]] = {}
        """Parts of responses that stream, which :meth:`parts` gives; None after the last."""

    async def open(self, round_index: int, engines: int, other_routers: Mapping[int, ActorHandle]) -> None:
        """Give requests to so many engines, and let their ranks fetch from other routers too.

        Args:
            round_index: number of this round of the engines; the others that concern it name it too, because calls
                of an actor may overtake each other.
            engines: how many there are.
            other_routers: the other routers by their numbers.
        """
        self.router.close()
        self._round, self._is_open = round_index, True
        self._mailboxes = [_Mailbox() for _ in range(engines)]
        self.router.open(self._mailboxes)
        for index, other in other_routers.items():
            await self.join(index, other)
        async with self._opened:
            self._opened.notify_all()

    async def round_opened(self, round_index: int) -> None:
        """Wait for the call of :meth:`open` with this number, or a later one."""
        async with self._opened:
            await self._opened.wait_for(lambda: self._round >= round_index)

    async def join(self, index: int, other: ActorHandle) -> None:
        """Let the ranks fetch from another router too."""
        for mailbox in self._mailboxes:
            mailbox.add(("join", index, other))

    async def close(self, round_index: int) -> None:
        """Let the engines of a round end; see :meth:`Router.close`."""
        if round_index == self._round:
            self._is_open = False
            self.router.close()

    async def generate(self, conversation: str, request: RolloutRequest, stream: str | None = None) -> RolloutOutput:
        """See :meth:`Router.generate`. Its parts are kept under the name ``stream``, for :meth:`parts`."""
        if stream is None:
            return await self.router.generate(conversation, request)
        parts = self._streams[stream] = asyncio.Queue()
        try:
            return await self.router.generate(conversation, request, parts.put_nowait)
        finally:
            parts.put_nowait(None)
            del self._streams[stream]

    async def parts(self, stream: str) -> list[DrawnPart]:
        """Wait for parts of a response that streams, and return those there are; none after its end."""
        queue = self._streams.get(stream)
        first = None if queue is None else await queue.get()
        if queue is None or first is None:
            return []
        arrived = [first]
        while not queue.empty() and (part := queue.get_nowait()) is not None:
            arrived.append(part)
        return arrived

    async def silences(self) -> list[float | None]:
        """See :meth:`Router.silences`."""
        return self.router.silences()

    async def state(self) -> SessionState:
        """See :meth:`Router.state`."""
        return self.router.state()

    async def pause(self) -> None:
        """See :meth:`Router.pause`."""
        self.router.pause()

    async def interrupt(self) -> None:
        """See :meth:`Router.interrupt`."""
        await self.router.interrupt()

    async def resume(self, round_index: int = 0) -> None:
        """See :meth:`Router.resume`; waits for the call of :meth:`open` with this number."""
        await self.round_opened(round_index)
        self.router.resume()

    async def abort(self) -> None:
        """See :meth:`Router.abort`."""
        self.router.abort()

    async def are_engines_awake(self) -> bool:
        """Wait at most ``AWAKE_S`` seconds until all engines are awake and ask for requests; return whether they do."""
        try:
            await asyncio.wait_for(asyncio.gather(*(box.was_asked.wait() for box in self._mailboxes)), AWAKE_S)
        except TimeoutError:
            return False
        return True

    async def weight_version(self) -> int:
        """See :attr:`Router.weight_version`."""
        return self.router.weight_version

    async def fetch(self, round_index: int, engine: int, weight_version: int) -> list[Command]:
        """Wait for commands to an engine, which has weights of this version, and return them."""
        await self.round_opened(round_index)
        if round_index != self._round or not self._is_open:
            return [("close", 0, None)]
        self.router.weight_version = weight_version
        return await self._mailboxes[engine].fetch()

    async def take_answers(self, round_index: int, answers: Sequence[tuple[int, Answer | DrawnPart]]) -> None:
        """Pass answers of an engine on."""
        if round_index == self._round:
            for request_id, answer in answers:
                self.router.take_answer(request_id, answer)


class RayRequests:
    """Requests of all routers of a session; see :class:`verl.workers.rollout.request_queue.EngineRequests`.

    Args:
        router: the driver's router.
        round_index: number of the call of ``awake``.
    """

    def __init__(self, router: ActorHandle, round_index: int) -> None:
        self._router, self._round = router, round_index

    @contextmanager
    def open_queue(self, engine_index: int, weight_version: int) -> Iterator[RequestQueue]:
        """Yield a queue that a thread fills with what the routers have for the engine."""
        fetching = _Fetching(self._router, self._round, engine_index, weight_version)
        threading.Thread(target=fetching.run, name="requests", daemon=True).start()
        try:
            yield fetching.queue
        finally:  # after an error the thread ends with the routers, which the driver closes
            fetching.queue.close()


class _Fetching:
    """Fills the queue of an engine, and sends its answers back."""

    def __init__(self, router: ActorHandle, round_index: int, engine: int, weight_version: int) -> None:
        self._engine = round_index, engine, weight_version
        self._round = round_index
        self._routers: dict[int, ActorHandle] = {0: router}
        self._unanswered: dict[int, set[int]] = {0: set()}
        """Numbers of the requests of each router."""
        self._fetched: dict[ObjectRef, int] = {}
        """Router of each reference to commands that come."""
        self._images = ImageReceiver(_pixels)
        self.queue = RequestQueue(self._answer)

    def run(self) -> None:
        self._fetch(0)
        while not self.queue.is_closed:
            self._follow(*ray.wait(list(self._fetched), num_returns=1)[0])  # no variable: it would keep images alive

    def _fetch(self, router: int) -> None:
        self._fetched[self._routers[router].fetch.remote(*self._engine)] = router

    # A function of its own, so that no variable keeps references to images until the next command comes.
    def _follow(self, reference: ObjectRef) -> None:
        router = self._fetched.pop(reference)
        try:
            commands: list[Command] = ray.get(reference)
        except RayError as error:
            if router and isinstance(error, RayActorError):  # nobody waits for these answers
                for request_id in self._drop(router):
                    self.queue.cancel(request_id)
            else:  # the driver notices it too, and raises
                logger.warning("a router of requests does not answer: %s", brief(str(error)))
                self.queue.close()
            return
        for what, subject, value in commands:
            if what == "put":
                self._put(router, subject, value)
            elif what == "cancel":
                self._unanswered[router].discard(subject)
                self.queue.cancel(subject)
            elif what == "abort":
                self.queue.abort()
            elif what == "interrupt":
                self.queue.interrupt()
            elif what == "join":
                self._routers[subject], self._unanswered[subject] = value, set()
                self._fetch(subject)
            elif router == 0:
                self.queue.close()
                return
            else:
                self._drop(router)
                return
        self._fetch(router)

    def _put(self, router: int, request_id: int, request: RolloutRequest) -> None:
        self._unanswered[router].add(request_id)
        try:
            self.queue.put(request_id, self._images.opened(request))
        except RolloutError as error:
            self._answer(request_id, error)

    def _drop(self, router: int) -> tuple[int, ...]:
        del self._routers[router]
        return tuple(self._unanswered.pop(router))

    def _answer(self, request_id: int, answer: Answer | DrawnPart) -> None:
        index = request_id >> ID_BITS  # of the router that counts its ids from here
        router, unanswered = self._routers.get(index), self._unanswered.get(index)
        if router is None or unanswered is None:  # its process is lost
            return
        if not isinstance(answer, DrawnPart):
            unanswered.discard(request_id)
        router.take_answers.remote(self._round, [(request_id, answer)])


def _stored(pixels: np.ndarray) -> ObjectRef:
    try:
        return ray.put(pixels)
    except RayError as error:
        raise RolloutError(
            f"an image of {pixels.nbytes:,} bytes does not fit in Ray's object store, nor on the disk to which Ray "
            f"spills ({type(error).__name__}). Free space on the disk of Ray's temporary folder, or lower "
            "rollout.agent.max_concurrent."
        ) from error


def _pixels(reference: ObjectRef) -> np.ndarray:
    try:
        return ray.get(reference)
    except RayError as error:
        raise LookupError(type(error).__name__) from error


class ImageConnection(LocalConnection):
    """The way to the router of this actor, whose ``loop`` is set later; images go by Ray's object store."""

    def __init__(self, router: Router) -> None:
        super().__init__(router, None)
        self.images = ImageSender(_stored)
        """The images of all conversations of this process."""

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> LocalCall:
        """Send a request of a conversation."""
        return super().send(conversation, self.images.sent(conversation, request), on_part)

    def end(self, conversation: str) -> None:
        """Free the images that only this conversation had."""
        self.images.end(conversation)


class RayCall:
    """A request under way in another process."""

    def __init__(self, reference: ObjectRef) -> None:
        self._reference = reference

    def future(self) -> Future[RolloutOutput]:
        """Return its result; the loss of the router is an EngineLostError."""
        outcome: Future[RolloutOutput] = Future()

        def take(done: Future[RolloutOutput]) -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            elif isinstance(error, RayActorError):
                outcome.set_exception(EngineLostError("the router of the engines has ended."))
            else:
                outcome.set_exception(error)

        self._reference.future().add_done_callback(take)
        return outcome

    def cancel(self) -> None:
        """Withdraw it."""
        ray.cancel(self._reference)


class RayConnection:
    """The way to a :class:`RouterActor`; see :class:`verl.serving.connection.Connection`."""

    def __init__(self, router: ActorHandle) -> None:
        self._router = router
        self.images = ImageSender(_stored)
        """The images of all conversations of this process."""

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> RayCall:
        """Send a request of a conversation; a thread calls ``on_part``."""
        sent = self.images.sent(conversation, request)
        if on_part is None:
            return RayCall(self._router.generate.remote(conversation, sent))
        stream = uuid.uuid4().hex
        reference = self._router.generate.remote(conversation, sent, stream)

        def tell() -> None:
            with suppress(RayError):  # the answer raises the error; here it only ends the stream
                while parts := ray.get(self._router.parts.remote(stream)):
                    for part in parts:
                        on_part(part)

        threading.Thread(target=tell, name="streamed tokens", daemon=True).start()
        return RayCall(reference)

    def end(self, conversation: str) -> None:
        """Free the images that only this conversation had."""
        self.images.end(conversation)


class RaySession:
    """See :class:`verl.serving.session.Session`.

    Args:
        title: whose session it is, for messages.
        room: most requests that the router of one process gives an engine at once.
        limit_s: how long the driver's router may not answer.
        router_class: class of the driver's router.
        ended: message of the error with which requests are refused while the engines sleep.
    """

    def __init__(
        self,
        title: str,
        room: int,
        limit_s: float,
        router_class: type[RouterActor] = RouterActor,
        ended: str = ENDED,
    ) -> None:
        self._title, self._room, self._limit_s, self._ended = title, room, limit_s, ended
        self._router_class = router_class
        self._router: WatchedActor | None = None
        self._connection: RayConnection | None = None
        self._other_routers: dict[int, WatchedActor] = {}
        self._indices = itertools.count(1)
        self._rounds = itertools.count(1)
        self._is_paused = False
        self._round: tuple[int, int] | None = None
        """Number of this round and of its engines; None while they sleep."""
        self._serving: tuple[WorkerGroup, PendingOutputs[object]] | None = None
        """The worker group whose engines are awake, and the outputs of its call."""

    # ---- routers

    @property
    def router(self) -> WatchedActor:
        """The driver's router, which starts with the first use."""
        if self._router is None:
            title = f"the router of {self._title}"
            arguments = self._router_class, "silences", self._limit_s, self._room, self._ended
            self._router = WatchedActor(title, *arguments)
            self._connection = RayConnection(self._router.actor)
        return self._router

    def new_index(self) -> int:
        """Return a number for another router."""
        return next(self._indices)

    def add(self, index: int, router: WatchedActor) -> None:
        """Take requests of another router, made with a number from :meth:`new_index`, from now on."""
        self._other_routers[index] = router
        if self._is_paused:
            router.actor.pause.remote()
        if self._round is not None:
            router.actor.open.remote(*self._round, {})
            self.router.actor.join.remote(index, router.actor)

    def remove(self, index: int) -> None:
        """Take no requests of a router any more, whose process has ended."""
        self._other_routers.pop(index, None)

    # ---- requests of this process

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> RayCall:
        """See :class:`verl.serving.connection.Connection`."""
        if self._connection is None:
            raise RolloutEndedError(self._ended)
        return self._connection.send(conversation, request, on_part)

    def end(self, conversation: str) -> None:
        """See :class:`verl.serving.connection.Connection`."""
        if self._connection is not None:
            self._connection.end(conversation)

    # ---- engines

    def serve_while(self, group: WorkerGroup, start: Callable[[], Future[T]]) -> Deferred[T]:
        """See :meth:`verl.serving.session.Session.serve_while`."""
        with ExitStack() as on_failure:
            on_failure.enter_context(self.awake(group))
            while not self.router.result(self.router.actor.are_engines_awake.remote()):
                self.check()
            outcome = start()
            served = on_failure.pop_all()

        def result() -> T:
            with served:
                while not wait_for_futures([outcome], CHECK_S).done:
                    self.check()
            return outcome.result()

        return Deferred([outcome], result)

    @contextmanager
    def awake(self, group: WorkerGroup, keeps_requests: bool = False) -> Iterator[None]:
        """Let the engines of a group serve within the context; after an error :meth:`close` the session.

        With ``keeps_requests`` the session stays if ranks are lost and its router is not: requests wait, those under
        way without the tokens drawn since they were last interrupted, for the engines of another call.
        """
        engines = len(group.mesh("rollout").collecting_ranks)
        this_round = self._round = next(self._rounds), engines
        with ExitStack() as on_failure:
            on_failure.callback(self._close_in, this_round)
            try:
                with self._loss_named():
                    for other in self._other_routers.values():
                        other.actor.open.remote(*this_round, {})
                    router, other_actors = (
                        self.router,
                        {index: other.actor for index, other in self._other_routers.items()},
                    )
                    router.result(router.actor.open.remote(*this_round, other_actors))
                    self._serving = group, group.serve(RayRequests(router.actor, this_round[0]))
                    yield
                    self._end_round(this_round[0])
                    group.wait_for(self._serving[1])
            except ProcessLostError:
                if keeps_requests:
                    with suppress(ActorSilentError, RayActorError):  # without the router its requests are lost too
                        self.pause()
                        self._end_round(this_round[0])
                        self._round = self._serving = None
                        on_failure.pop_all()
                raise
            self._round = self._serving = None
            on_failure.pop_all()

    def _end_round(self, round_index: int) -> None:
        """Let the engines end their work."""
        for other in list(self._other_routers.values()):
            other.actor.close.remote(round_index)
        self.router.result(self.router.actor.close.remote(round_index))

    @property
    def has_router(self) -> bool:
        """Return whether the driver's router runs: from the first use to :meth:`close`, which its loss calls."""
        return self._router is not None

    def _close_in(self, this_round: tuple[int, int]) -> None:
        """Close, unless the engines serve in a later round: an abandoned round ends late, when its handle is freed."""
        if self._round == this_round:
            self.close()

    @property
    def round_index(self) -> int:
        """Number of this round of the engines, which are awake."""
        assert self._round is not None
        return self._round[0]

    def check(self, silences: Iterable[Sequence[float | None]] = ()) -> None:
        """Check the ranks whose engines are awake.

        Args:
            silences: newest answers of the other routers.

        Raises:
            ProcessLostError: a rank or the driver's router has ended or hangs.
            WorkerError: an engine failed.
        """
        assert self._serving is not None
        group, outputs = self._serving
        if group.any_returned(outputs):
            group.wait_for(outputs)  # raises why the ranks ended before their time
            self.router.result(self.router.actor.silences.remote())  # raises if it was because the router died
            raise WorkerError(f"the engines of {self._title} ended before they had answered all requests.")
        limit_s, silent_s = group.hang_timeout_s, longest_silence([self.router.poll() or [], *silences])
        if limit_s is not None and silent_s > limit_s:
            logger.error("%s: %s", self._title, described(self.state()))
            raise group.end_hanging(outputs)

    def pause(self) -> None:
        """See :meth:`verl.serving.session.Session.pause`."""
        self._is_paused = True
        self._call_all("pause")

    def interrupt(self) -> None:
        """See :meth:`verl.serving.session.Session.interrupt`.

        The routers share the engines, so requests of one may be interrupted before it is told to: it asks again at
        once, or holds them. One that dies meanwhile is its owner's.
        """
        self._is_paused = True
        routers = [self.router, *self._other_routers.values()]
        waits: dict[ObjectRef, WatchedActor] = {router.actor.interrupt.remote(): router for router in routers}
        while waits:
            for reference in ray.wait(list(waits), timeout=CHECK_S)[0]:
                router = waits.pop(reference)
                with suppress(RayActorError) if router is not self.router else self._loss_named():
                    router.result(reference)
            silences: list[Sequence[float | None]] = []
            for reference, router in list(waits.items()):
                if router is self.router:
                    continue
                try:
                    silences.append(router.poll() or [])
                except (ActorSilentError, RayActorError):
                    del waits[reference]
            if self._serving is not None:
                self.check(silences)

    @contextmanager
    def _loss_named(self) -> Iterator[None]:
        """Raise ProcessLostError if the driver's router dies within the context."""
        try:
            yield
        except RayActorError as error:
            raise ProcessLostError(f"the router of {self._title} died: {brief(str(error))}") from error

    def resume(self) -> None:
        """See :meth:`verl.serving.session.Session.resume`."""
        self._is_paused = False
        self._call_all("resume", 0 if self._round is None else self._round[0])

    def abort(self) -> None:
        """See :meth:`verl.serving.session.Session.abort`."""
        self._call_all("abort")

    def _call_all(self, method: str, *args: object) -> None:
        routers = list(self._other_routers.values())
        pending = [(router, getattr(router.actor, method).remote(*args)) for router in routers]
        self.router.result(getattr(self.router.actor, method).remote(*args))
        for router, reference in pending:
            with suppress(ActorSilentError, RayActorError):  # its owner notices it, and removes the router
                router.result(reference)

    def state(self) -> SessionState:
        """See :meth:`verl.serving.session.Session.state`; routers that do not answer for ``STATE_S`` are left out."""
        states = [SessionState(NO_WEIGHTS, 0, None, ())]
        routers = [] if self._router is None else [self._router, *self._other_routers.values()]
        references: list[ObjectRef] = [router.actor.state.remote() for router in routers]
        for reference in ray.wait(references, num_returns=len(references), timeout=STATE_S)[0] if references else []:
            with suppress(RayActorError):
                states.append(ray.get(reference))
        return joined(states)

    @property
    def weight_version(self) -> int:
        """See :meth:`verl.serving.session.Session.weight_version`."""
        if self._router is None:
            return NO_WEIGHTS
        return self._router.result(self._router.actor.weight_version.remote())

    def close(self) -> None:
        """End the driver's router; the others are their owner's. A later use starts a new one."""
        router, self._router, self._connection = self._router, None, None
        self._round, self._serving, self._is_paused = None, None, False
        self._other_routers.clear()
        if router is not None and ray.is_initialized():
            router.end()


def longest_silence(by_router: Iterable[Sequence[float | None]]) -> float:
    """Return the longest time that an engine has answered none of the routers whose requests it has, in seconds."""
    by_engine = itertools.zip_longest(*by_router)
    heard = [[seconds for seconds in engine_silences if seconds is not None] for engine_silences in by_engine]
    return max((min(seconds) for seconds in heard if seconds), default=0.0)
