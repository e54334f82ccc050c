"""Blocking functions and event loops in threads that nobody waits for at the end of the process."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread of its own and wait for it.

    Unlike those of ``asyncio.to_thread`` the thread is a daemon: a function that never returns holds up neither a
    later call nor the end of the process. A cancelled wait leaves the function running.
    """
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            result = context.run(function, *args, **kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the waiting side raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=f"tool {getattr(function, '__name__', 'call')}", daemon=True).start()
    return await asyncio.wrap_future(outcome)


class LoopThread:
    """An event loop in a daemon thread of its own.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def responds(self, within_s: float) -> bool:
        """Whether the loop runs a callback in time, so that no coroutine blocks it."""
        answered: Future[None] = Future()
        self.loop.call_soon_threadsafe(answered.set_result, None)
        done, _ = await asyncio.wait([asyncio.wrap_future(answered)], timeout=within_s)
        return bool(done)

    def stop(self) -> None:
        """Cancel what runs and end the thread, at once or, if code blocks it, as soon as that returns."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._cancel_rest())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
