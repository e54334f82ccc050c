"""The router: which engine serves which request of the running conversations.

A conversation stays with the engine that has its keys and values; a new one goes to the engine with the fewest
requests, or waits for the first one that has room. An engine is given at most ``room`` requests at once, and further
ones wait here.

::

    router = Router(room=8)
    router.open([queue_of_engine_0, queue_of_engine_1])   # the engines are awake
    output = await router.generate("conversation", request)
    router.pause()                                        # requests wait here; what runs goes on
    await router.interrupt()                              # what runs waits here too, with the tokens drawn so far
    router.close()                                        # the engines end their work, for new weights
    router.open([...]); router.resume()                   # what waited is sent, and responses go on
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from verl.errors import EngineLostError, RolloutError
from verl.serving.state import EngineLoad, SessionState
from verl.workers.rollout.request import NO_WEIGHTS, DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import Answer

REMEMBERED_CONVERSATIONS = 100_000
"""Conversations whose engine is remembered. Beyond that the least recently used is forgotten, to bound the memory."""
INTERRUPT_EVERY_S = 0.1
"""Interval at which engines are told to interrupt, until they have answered: one may be about to begin."""
MAX_EMPTY_ANSWERS = 100
"""Times in a row that an engine may end a request by itself without a token, before the caller gets that answer."""
ENDED = "no rollout is running, so no engine answers. Do not call generate after run() has returned."


class RolloutEndedError(RolloutError):
    """No engine answers any more, because the rollout has ended."""


class EngineLink(Protocol):
    """The way to one engine; none of its methods waits. A ``RequestQueue`` is one."""

    def put(self, request_id: int, request: RolloutRequest) -> None:
        """Send a request under an id that is new to the engine."""
        ...

    def cancel(self, request_id: int) -> None:
        """Withdraw a request."""
        ...

    def abort(self) -> None:
        """Let the engine answer what it draws now with the tokens there are."""
        ...

    def interrupt(self) -> None:
        """Let the engine answer all requests that it has with the tokens there are."""
        ...

    def close(self) -> None:
        """Let the engine end when it has answered its requests."""
        ...


@dataclass
class _PendingRequest:
    """A request without an answer yet."""

    conversation: str
    request: RolloutRequest
    """For the tokens that are left to draw."""
    answer: asyncio.Future[RolloutOutput]
    on_part: Callable[[DrawnPart], object] | None
    engine: int | None = None
    """None while it is held back, or waits for any engine."""
    partial: RolloutOutput | None = None
    """Tokens sampled before interruptions."""
    is_aborted: bool = False
    """True if :meth:`Router.abort` was called while it ran."""
    empty_answers: int = 0
    """Times that engines ended it by themselves since its last token."""

    def take(self, output: RolloutOutput, is_paused: bool) -> RolloutOutput | None:
        """Take what an engine has drawn; return the whole response if it has ended, and is not to go on."""
        if output.finish_reason != "abort" or self.is_aborted:
            return self._with_earlier_tokens(output)
        if not output.token_ids:
            # A paused router has interrupted the engine, which answers requests that it has not begun without tokens.
            self.empty_answers += not is_paused
            return None if self.empty_answers < MAX_EMPTY_ANSWERS else self._with_earlier_tokens(output)
        if (
            len(output.token_ids) == self.request.sampling.max_tokens
        ):  # interrupted after the last token: nothing is left
            return self._with_earlier_tokens(replace(output, finish_reason="length"))
        self.partial, self.empty_answers = self._with_earlier_tokens(output), 0
        self.request = self.request.after(output.token_ids)
        return None

    def _with_earlier_tokens(self, output: RolloutOutput) -> RolloutOutput:
        return output if self.partial is None else self.partial.followed_by(output)


@dataclass
class _RoutedEngine:
    link: EngineLink
    waiting: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    is_lost: bool = False
    heard_at: float = 0.0
    """Time of its first request, or of its last answer."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


class Router:
    """Requests of many conversations to several engines. All methods belong to one event loop.

    Args:
        room: most requests that one engine has at once.
        ended: message of the error with which requests are refused while there are no engines.
        first_id: ids of requests count from here; routers that share an engine have ranges of their own.
    """

    def __init__(self, room: int, ended: str = ENDED, first_id: int = 0) -> None:
        self._engines: list[_RoutedEngine] = []
        self._room, self._ended = room, ended
        self._ids = itertools.count(first_id)
        self._pending: dict[int, _PendingRequest] = {}
        self._held: dict[int, None] = {}
        """Requests that are held back by :meth:`pause`, in their order."""
        self._unbound: list[int] = []
        """Heap of requests without an engine that has their conversation: the first one with room takes the oldest."""
        self._home: OrderedDict[str, int] = OrderedDict()
        self._is_paused, self._paused_at = False, 0.0
        self._idle = asyncio.Event()
        """Set when an engine has no requests any more."""
        self._refusal: RolloutError | None = RolloutEndedError(ended)
        """Why requests are refused; None while there are engines."""
        self._slept_s, self._asleep_since = 0.0, time.monotonic()
        self.weight_version = NO_WEIGHTS
        """Version of the weights that the engines have, or had when they were closed."""

    def open(self, links: Sequence[EngineLink]) -> None:
        """Give requests to these engines from now on."""
        self._engines = [_RoutedEngine(link) for link in links]
        self._home.clear()  # these engines know no conversation yet
        self._slept_s = self.asleep_s
        self._refusal = None

    @property
    def asleep_s(self) -> float:
        """For how many seconds there have been no engines since the router was made."""
        return self._slept_s + (0.0 if self._refusal is None else time.monotonic() - self._asleep_since)

    @property
    def waiting(self) -> int:
        """Number of requests that no engine has."""
        return len(self._held) + len(self._unbound) + sum(len(engine.waiting) for engine in self._engines)

    async def generate(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> RolloutOutput:
        """Draw a response; cancelling the call frees the engine's place at once.

        Args:
            conversation: id of the conversation; its requests go to one engine.
            request: the prompt, with all that came before it, and the sampling parameters.
            on_part: called with the parts of a response that streams.

        Raises:
            RolloutError: the request cannot be served, the rollout has ended, or all engines are lost.
        """
        if self._refusal is not None and not self._is_paused:
            raise self._refusal
        request_id = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._pending[request_id] = _PendingRequest(conversation, request, answer, on_part)
        self._place(request_id)
        try:
            return await answer
        finally:
            self._forget(request_id)

    def take_answer(self, request_id: int, answer: Answer | DrawnPart) -> None:
        """Pass on an engine's answer, or a part of it; that of a cancelled request is ignored."""
        pending = self._pending.get(request_id)
        if pending is None or pending.engine is None or pending.answer.done():
            return
        self._engines[pending.engine].heard_at = time.monotonic()
        if isinstance(answer, DrawnPart):
            if pending.on_part is not None:
                pending.on_part(replace(answer, start=pending.request.drawn_count + answer.start))
        elif isinstance(answer, EngineLostError):
            self._move_from_lost_engine(pending.engine, answer)
        elif isinstance(answer, RolloutError):
            pending.answer.set_exception(answer)
        elif (response := pending.take(answer, self._is_paused)) is not None:
            pending.answer.set_result(response)
        else:
            self._requeue_interrupted(request_id, answer.token_ids)

    def _requeue_interrupted(self, request_id: int, token_ids: list[int]) -> None:
        """Ask for the rest of an interrupted response, now or after :meth:`resume`."""
        pending = self._pending[request_id]
        if token_ids and pending.on_part is not None:  # not all of them may have been told
            pending.on_part(DrawnPart(pending.request.drawn_count - len(token_ids), token_ids))
        assert pending.engine is not None
        engine_index, pending.engine = pending.engine, None
        self._leave(engine_index, request_id)
        self._place(request_id)
        self._send(engine_index)

    def silences(self) -> list[float | None]:
        """Return for how many seconds each engine has answered none of its requests; None for one that has none."""
        now = time.monotonic()
        return [now - engine.heard_at if engine.running else None for engine in self._engines]

    def state(self) -> SessionState:
        """Return what the engines do with requests of this router."""
        paused_s = time.monotonic() - self._paused_at if self._is_paused else None
        loads = [
            EngineLoad(len(engine.running), len(engine.waiting), silent_s, engine.is_lost)
            for engine, silent_s in zip(self._engines, self.silences(), strict=True)
        ]
        held = len(self._held) + len(self._unbound)
        return SessionState(self.weight_version, held, paused_s, tuple(loads))

    def partial_responses(self) -> dict[str, RolloutOutput]:
        """Return the tokens of interrupted responses so far, by conversation."""
        return {each.conversation: each.partial for each in self._pending.values() if each.partial is not None}

    def pause(self) -> None:
        """Hold back requests that no engine has yet, also over :meth:`close` and :meth:`open`. Idempotent."""
        if not self._is_paused:
            self._is_paused, self._paused_at = True, time.monotonic()
        for waiting in (self._unbound, *(engine.waiting for engine in self._engines)):
            self._hold(list(waiting))
            waiting.clear()

    async def interrupt(self) -> None:
        """Hold back all requests, those that engines run with the tokens drawn so far; :meth:`resume` lets them go on.

        It includes :meth:`pause`, and returns when every engine has answered, so that :meth:`close` loses no token. A
        response goes on in another :meth:`open` too, with other weights, and its caller gets it whole. It may be called
        again meanwhile; :meth:`resume` and :meth:`close` end it.
        """
        self.pause()
        while self._is_paused and (running := [engine for engine in self._engines if engine.running]):
            for engine in running:
                engine.link.interrupt()
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), INTERRUPT_EVERY_S)

    def resume(self) -> None:
        """Send what was held back; it is refused if there are no engines. Idempotent."""
        self._is_paused = False
        held, self._held = sorted(self._held), {}  # by id: in the order in which they were asked first
        for request_id in held:
            if self._refusal is None:
                self._place(request_id)
            elif not self._pending[request_id].answer.done():
                self._pending[request_id].answer.set_exception(self._refusal)

    def abort(self) -> None:
        """Let all engines answer what they draw now with the tokens there are and ``finish_reason`` "abort"."""
        for engine in self._engines:
            for request_id in engine.running:
                self._pending[request_id].is_aborted = True
            if engine.running:
                engine.link.abort()

    def close(self, error: RolloutError | None = None) -> None:
        """End all engines' work, and withdraw what they run. Idempotent.

        Requests without an answer fail with ``error``; without an error, those of a paused router are held back
        instead, and are asked again of the next engines.
        """
        if self._refusal is not None:
            return
        self._refusal, self._asleep_since = error or RolloutEndedError(self._ended), time.monotonic()
        for engine in self._engines:
            for request_id in engine.running:
                engine.link.cancel(request_id)
            engine.link.close()
        self._engines = []
        self._unbound.clear()
        self._idle.set()  # wakes `interrupt`, whose engines answer no more
        if self._is_paused and error is None:
            self._hold(list(self._pending))
            return
        self._held.clear()
        for pending in self._pending.values():
            pending.engine = None
            if not pending.answer.done():
                pending.answer.set_exception(self._refusal)

    def _hold(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._pending[request_id].engine = None
            self._held[request_id] = None

    def _place(self, request_id: int) -> None:
        """Give a request to the engine of its conversation, for a new one to any with room, or hold it back."""
        pending = self._pending[request_id]
        if self._is_paused:
            self._held[request_id] = None
            return
        home = self._home.get(pending.conversation)
        if home is None or self._engines[home].is_lost:
            living = [index for index, engine in enumerate(self._engines) if not engine.is_lost]
            home = min(living, key=lambda index: self._engines[index].load)
            if self._engines[home].load >= self._room:  # another one may have room sooner
                heapq.heappush(self._unbound, request_id)
                return
        self._bind(request_id, home)
        self._send(home)

    def _bind(self, request_id: int, engine_index: int) -> None:
        """Let a request, and its conversation, wait for an engine."""
        pending = self._pending[request_id]
        pending.engine = self._home[pending.conversation] = engine_index
        self._home.move_to_end(pending.conversation)
        if len(self._home) > REMEMBERED_CONVERSATIONS:
            self._home.popitem(last=False)
        waiting = self._engines[engine_index].waiting
        if waiting and request_id < waiting[0]:
            waiting.appendleft(request_id)
        else:
            waiting.append(request_id)

    def _bind_next(self, engine_index: int) -> None:
        """Let an engine that has room take the next new conversation, if that is older than what waits for it."""
        waiting = self._engines[engine_index].waiting
        while self._unbound and not (waiting and waiting[0] < self._unbound[0]):
            request_id = heapq.heappop(self._unbound)
            home = self._home.get(self._pending[request_id].conversation)
            is_bound = home is not None and not self._engines[home].is_lost  # by an earlier request of it
            self._bind(request_id, home if home is not None and is_bound else engine_index)

    def _send(self, engine_index: int) -> None:
        """Give an engine the requests for which it has room."""
        engine = self._engines[engine_index]
        while not engine.is_lost and len(engine.running) < self._room:
            self._bind_next(engine_index)
            if not engine.waiting:
                return
            request = engine.waiting.popleft()
            if not engine.running:  # it has had nothing to answer: its silence counts from here
                engine.heard_at = time.monotonic()
            engine.running.add(request)
            engine.link.put(request, self._pending[request].request)

    def _forget(self, request_id: int) -> None:
        pending = self._pending.pop(request_id)
        self._held.pop(request_id, None)
        if pending.engine is None:
            if request_id in self._unbound:
                self._unbound.remove(request_id)
                heapq.heapify(self._unbound)
            return
        engine = self._engines[pending.engine]
        if request_id in engine.waiting:
            engine.waiting.remove(request_id)
        if request_id in engine.running:
            self._leave(pending.engine, request_id)
            if pending.answer.cancelled():
                engine.link.cancel(request_id)
        self._send(pending.engine)

    def _leave(self, engine_index: int, request_id: int) -> None:
        """Note that an engine runs a request no more."""
        running = self._engines[engine_index].running
        running.discard(request_id)
        if not running:
            self._idle.set()

    def _move_from_lost_engine(self, lost: int, error: EngineLostError) -> None:
        """Give the requests of a lost engine to the others."""
        engine = self._engines[lost]
        engine.is_lost = True
        orphans = [*engine.running, *engine.waiting]
        engine.running.clear()
        engine.waiting.clear()
        self._idle.set()
        if all(other.is_lost for other in self._engines):
            self.close(error)
            return
        for request_id in sorted(orphans):
            self._pending[request_id].engine = None
            if not self._pending[request_id].answer.done():
                self._place(request_id)
