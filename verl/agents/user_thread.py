"""Code of users in one trajectory: in a thread that no other trajectory uses meanwhile, under a limit of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from verl.agents.loop import TrajectoryError
from verl.base.redact import redacted
from verl.tools.threads import LoopThread, LoopThreads, called

T = TypeVar("T")

MAX_CHARACTERS = 1000
"""Length of a message, which may hold whatever an exception says."""


class UserThread:
    """Calls functions, of which some are ``async``, one after the other in one thread.

    What goes wrong with them ends the trajectory with the status ``environment_error``.

    Args:
        who: whose code it is, for messages: ``the interaction 'gsm8k'``.
        timeout_s: longest time of one call.
        threads: lend the thread.
    """

    def __init__(self, who: str, timeout_s: float, threads: LoopThreads) -> None:
        self._who = who
        self._timeout_s = timeout_s
        self._threads = threads
        self._thread: LoopThread | None = None

    async def call(self, function: Callable[..., T | Awaitable[T]], *args: object, **kwargs: object) -> T:
        """Call a function in the thread.

        Raises:
            TrajectoryError: it raised, or took too long.
        """
        self._thread = self._thread or self._threads.lend(f"{self._who} of a trajectory")
        future = self._thread.submit(called(function, *args, **kwargs))
        name = getattr(function, "__name__", "a call")
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not this trajectory was cancelled, but the user's code
                raise self.error(f"{name} was cancelled by its own code") from error
            self.leave()
            raise
        except Exception as error:  # users' code raises anything
            if isinstance(error, TimeoutError) and limit.expired():
                self.leave()
                raise self.error(f"{name} took longer than tool_timeout_s={self._timeout_s:g} s") from None
            raise self.error(f"{name} failed: {type(error).__name__}: {error}") from error

    def leave(self) -> None:
        """Give the thread back; if code blocks it, it is free when that returns. A later call gets another."""
        if self._thread is not None:
            self._threads.take_back(self._thread)
            self._thread = None

    def error(self, message: str) -> TrajectoryError:
        """Make the error that ends the trajectory."""
        return TrajectoryError(f"{self._who}: {redacted(message)[:MAX_CHARACTERS]}.", "environment_error")
