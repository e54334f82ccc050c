"""The way from conversations to the router of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from verl.serving.router import ENDED, RolloutEndedError, Router
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest


class GenerationCall(Protocol):
    """A request under way."""

    def future(self) -> Future[RolloutOutput] | asyncio.Future[RolloutOutput]:
        """Return its result."""
        ...

    def cancel(self) -> None:
        """Withdraw it."""
        ...


class Connection(Protocol):
    """The way from conversations to the router; may be used by any thread."""

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> GenerationCall:
        """Send a request of a conversation; call ``on_part``, in any thread, with parts of a response that streams."""
        ...

    def end(self, conversation: str) -> None:
        """Free what is kept for the further turns of a conversation. Idempotent."""
        ...


class LocalCall:
    """A request under way in this process."""

    def __init__(self, future: Future[RolloutOutput] | asyncio.Future[RolloutOutput]) -> None:
        self._future = future

    def future(self) -> Future[RolloutOutput] | asyncio.Future[RolloutOutput]:
        """Return its result."""
        return self._future

    def cancel(self) -> None:
        """Withdraw it."""
        self._future.cancel()


class LocalConnection:
    """The way to a router in this process; see :class:`Connection`.

    Args:
        router: the router.
        loop: the running event loop to which it belongs; None if :attr:`loop` is set before the first request.
    """

    def __init__(self, router: Router, loop: asyncio.AbstractEventLoop | None) -> None:
        self.router, self._loop = router, loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the router."""
        assert self._loop is not None
        return self._loop

    @loop.setter
    def loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> LocalCall:
        """Send a request of a conversation."""
        if self.loop.is_closed():
            raise RolloutEndedError(ENDED)
        generating = self.router.generate(conversation, request, on_part)
        try:
            is_in_loop = asyncio.get_running_loop() is self.loop
        except RuntimeError:  # this thread runs no event loop
            is_in_loop = False
        if is_in_loop:
            return LocalCall(self.loop.create_task(generating))
        return LocalCall(asyncio.run_coroutine_threadsafe(generating, self.loop))

    def end(self, conversation: str) -> None:
        """Do nothing: images lie in this process, and belong to their conversation alone."""
