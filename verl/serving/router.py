"""The router: which engine serves which request of the running conversations.

A conversation stays with the engine that has its keys and values; a new one goes to the engine with the fewest
requests. An engine is given at most ``room`` requests at once, and further ones wait here.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from verl.errors import EngineLostError, RolloutError
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import Answer

REMEMBERED_CONVERSATIONS = 100_000
ENDED = "the rollout has ended, and its engines take no more requests. Do not call generate after run() has returned."


class RolloutEndedError(RolloutError):
    """No engine answers any more, because the rollout has ended."""


class EngineLink(Protocol):
    """The way to one engine; none of its methods waits."""

    def put(self, number: int, request: RolloutRequest) -> None:
        """Send a request under a number that is new to the engine."""
        ...

    def cancel(self, number: int) -> None:
        """Withdraw a request."""
        ...

    def close(self) -> None:
        """Let the engine end when it has answered its requests."""
        ...


@dataclass
class _PendingRequest:
    """A request without an answer yet."""

    conversation: str
    request: RolloutRequest
    answer: asyncio.Future[RolloutOutput]
    engine: int
    on_part: Callable[[DrawnPart], object] | None


@dataclass
class _RoutedEngine:
    link: EngineLink
    waiting: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    is_lost: bool = False
    heard_at: float = 0.0
    """When it got its first request, or gave its last answer."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


class Router:
    """Requests of many conversations to several engines. All methods belong to one event loop.

    Args:
        links: the way to each engine.
        room: most requests that one engine has at once.
    """

    def __init__(self, links: Sequence[EngineLink], room: int) -> None:
        self._engines = [_RoutedEngine(link) for link in links]
        self._room = room
        self._numbers = itertools.count()
        self._asked: dict[int, _PendingRequest] = {}
        self._home: OrderedDict[str, int] = OrderedDict()
        self._over: RolloutError | None = None

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
        if self._over is not None:
            raise self._over
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        asked = _PendingRequest(conversation, request, answer, self._engine_of(conversation), on_part)
        self._asked[number] = asked
        self._engines[asked.engine].waiting.append(number)
        self._send(asked.engine)
        try:
            return await asked.answer
        finally:
            self._forget(number)

    def take_answer(self, number: int, answer: Answer | DrawnPart) -> None:
        """Pass an engine's answer, or a part of it, on; one that nobody waits for is ignored."""
        asked = self._asked.get(number)
        if asked is None or asked.answer.done():
            return
        self._engines[asked.engine].heard_at = time.monotonic()
        if isinstance(answer, DrawnPart):
            if asked.on_part is not None:
                asked.on_part(answer)
        elif isinstance(answer, EngineLostError):
            self._move_from_lost_engine(asked.engine, answer)
        elif isinstance(answer, RolloutError):
            asked.answer.set_exception(answer)
        else:
            asked.answer.set_result(answer)

    def silent_s(self) -> float:
        """Return for how long the most silent of the engines at work has answered none of its requests."""
        at_work = [engine.heard_at for engine in self._engines if engine.running]
        return time.monotonic() - min(at_work) if at_work else 0.0

    def close(self, error: RolloutError | None = None) -> None:
        """End all engines' work: requests without an answer fail with ``error``, and are withdrawn. Idempotent."""
        if self._over is not None:
            return
        self._over = error or RolloutEndedError(ENDED)
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(self._over)
        for engine in self._engines:
            for number in engine.running:
                engine.link.cancel(number)
            engine.link.close()

    def _engine_of(self, conversation: str) -> int:
        home = self._home.get(conversation)
        if home is None or self._engines[home].is_lost:
            living = [number for number, engine in enumerate(self._engines) if not engine.is_lost]
            home = min(living, key=lambda number: self._engines[number].load)
        self._home[conversation] = home
        self._home.move_to_end(conversation)
        if len(self._home) > REMEMBERED_CONVERSATIONS:
            self._home.popitem(last=False)
        return home

    def _send(self, number: int) -> None:
        """Give an engine the requests for which it has room."""
        engine = self._engines[number]
        while engine.waiting and len(engine.running) < self._room:
            request = engine.waiting.popleft()
            if not engine.running:
                engine.heard_at = time.monotonic()
            engine.running.add(request)
            engine.link.put(request, self._asked[request].request)

    def _forget(self, number: int) -> None:
        asked = self._asked.pop(number)
        engine = self._engines[asked.engine]
        if number in engine.waiting:
            engine.waiting.remove(number)
        if number in engine.running:
            engine.running.discard(number)
            if asked.answer.cancelled():
                engine.link.cancel(number)
        if self._over is None:
            self._send(asked.engine)

    def _move_from_lost_engine(self, lost: int, error: EngineLostError) -> None:
        """Give the requests of a lost engine to the others."""
        engine = self._engines[lost]
        engine.is_lost = True
        orphans = [*engine.running, *engine.waiting]
        engine.running.clear()
        engine.waiting.clear()
        if all(other.is_lost for other in self._engines):
            self.close(error)
            return
        for number in sorted(orphans):
            asked = self._asked[number]
            if asked.answer.done():
                continue
            asked.engine = self._engine_of(asked.conversation)
            self._engines[asked.engine].waiting.append(number)
        for other in range(len(self._engines)):
            self._send(other)
