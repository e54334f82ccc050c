"""Blocking functions and event loops in daemon threads, which do not delay the end of the process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
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


class DaemonThreads(ThreadPoolExecutor):
    """The executor of an event loop for ``asyncio.to_thread``, with daemon threads.

    Threads of the base class delay the end of the process until the last of their functions has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most = min(32, (os.cpu_count() or 1) + 4)  # as many as by default
        self._waiting: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._running = 0
        self._is_over = False
        self._changed = threading.Condition()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        outcome: Future[T] = Future()
        with self._changed:
            if self._is_over:
                raise RuntimeError("the event loop has ended, and starts no more functions.")
            self._waiting.append((outcome, partial(fn, *args, **kwargs)))
            if self._running < self._most:
                self._running += 1
                threading.Thread(target=self._run, name="to_thread", daemon=True).start()
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :meth:`concurrent.futures.Executor.shutdown`."""
        with self._changed:
            self._is_over = True
            if cancel_futures:
                for outcome, _ in self._waiting:
                    outcome.cancel()
            if wait:
                self._changed.wait_for(lambda: not self._running)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                outcome, function = self._waiting.popleft()
            if not outcome.set_running_or_notify_cancel():
                continue
            try:
                outcome.set_result(function())
            except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised by who waits
                outcome.set_exception(error)
            del outcome, function  # a thread that waits for the lock keeps no result


async def called(function: Callable[..., T | Awaitable[T]], *args: object, **kwargs: object) -> T:
    """Call a function of users, ``async`` or not; turn an exit, which would end the event loop, into an error."""
    try:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result  # pyright: ignore[reportReturnType]
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from error
    except KeyboardInterrupt as error:
        raise RuntimeError("KeyboardInterrupt") from error


class LoopThread:
    """An event loop in a daemon thread of its own.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def responds(self, within_s: float) -> bool:
        """Return whether the loop runs a callback in time, so that no coroutine blocks it."""
        answered: Future[None] = Future()
        self.loop.call_soon_threadsafe(answered.set_result, None)
        done, _ = await asyncio.wait([asyncio.wrap_future(answered)], timeout=within_s)
        return bool(done)

    def stop(self) -> None:
        """Cancel what runs and end the thread, at once or, if code blocks it, as soon as that returns."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)

    @property
    def is_alive(self) -> bool:
        """Return whether it still runs coroutines."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def rename(self, name: str) -> None:
        """Change the name of the thread."""
        self._thread.name = name

    def clear(self, on_clear: Callable[[LoopThread], object]) -> None:
        """Cancel what runs and then call ``on_clear`` in the thread, at once or as soon as code that blocks it returns.

        Code that does not end when it is cancelled keeps the thread.
        """
        if self.is_alive:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._clear(on_clear)))

    async def _clear(self, on_clear: Callable[[LoopThread], object]) -> None:
        await self._cancel_rest()
        on_clear(self)

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


class LoopThreads:
    """A pool of event loops in threads, each used by one trajectory at a time: a new one costs a millisecond.

    The pool grows to the largest number in use at once. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LoopThread] = []
        self._is_closed = False
        weakref.finalize(self, _stop_all, self._idle)

    def lend(self, name: str) -> LoopThread:
        """Return a thread in which nothing runs, under the name ``name``."""
        with self._lock:
            while self._idle:
                thread = self._idle.pop()
                if thread.is_alive:  # a borrower's code may have ended it
                    thread.rename(name)
                    return thread
        return LoopThread(name)

    def take_back(self, thread: LoopThread) -> None:
        """Cancel what a borrower left running, and lend the thread again as soon as nothing runs in it."""
        thread.clear(self._keep)

    def close(self) -> None:
        """End the threads: those that are lent, when they are given back."""
        with self._lock:
            self._is_closed = True
            _stop_all(self._idle)

    def _keep(self, thread: LoopThread) -> None:
        thread.rename("idle")
        with self._lock:
            if not self._is_closed:
                self._idle.append(thread)
                return
        thread.stop()


def _stop_all(threads: list[LoopThread]) -> None:
    while threads:
        threads.pop().stop()
