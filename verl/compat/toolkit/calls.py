"""Wrappers of functions: a time limit, coroutines called from plain code, a note that a function is deprecated."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import multiprocessing
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import typing_extensions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., object])


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[F], F]:
    """Make a function raise ``TimeoutError`` if a call takes longer than ``seconds``.

    Args:
        seconds: limit of a call.
        use_signals: interrupt the call by ``SIGALRM``, in the main thread of a Unix process only, and between two
            steps of Python; otherwise the call runs in a child process, which is killed. The child's arguments and
            result must be picklable, and what it changes is lost.
    """

    def limited(function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            run = _by_signal if use_signals else _in_child
            return run(function, args, kwargs, seconds)

        return call  # type: ignore[return-value]

    return limited


def _too_long(function: Callable[..., object], seconds: float) -> TimeoutError:
    return TimeoutError(f"{getattr(function, '__name__', function)} took longer than {seconds:g} s.")


def _by_signal(function: Callable[..., object], args: tuple, kwargs: dict[str, object], seconds: float) -> object:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("use_signals=True works in the main thread only; leave it out to use a process.")

    def interrupt(signum: int, frame: object) -> None:
        raise _too_long(function, seconds)

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of the caller, later by the time that the function took


def _in_child(function: Callable[..., object], args: tuple, kwargs: dict[str, object], seconds: float) -> object:
    # A fork takes any function along; one that a decorator replaced cannot be pickled by its name.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(writer, function, args, kwargs), daemon=True)
    child.start()
    writer.close()
    try:
        if not reader.poll(seconds):
            raise _too_long(function, seconds)
        try:
            result, error = reader.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"the process of {function.__name__} ended with exit code {child.exitcode}.") from None
    finally:
        child.kill()
        child.join()
        reader.close()
    if error is not None:
        raise error
    return result


def _send_result(writer: Connection, function: Callable[..., object], args: tuple, kwargs: dict[str, object]) -> None:
    try:
        answer = (function(*args, **kwargs), None)
    except Exception as error:  # noqa: BLE001 - the caller, in another process, raises it
        answer = (None, error)
    writer.send(answer)


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, or that of this thread, made if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = None
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    return loop


def auto_await(func: Callable[..., object]) -> Callable[..., object]:
    """Let an ``async`` function be called from plain code too.

    A call inside of a running event loop returns a coroutine to await, as before; anywhere else it runs to the end and
    returns the result.
    """

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> object:
        result = func(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        loop = get_event_loop()
        # One loop for all calls of a thread: objects such as locks and connections belong to the loop that made them.
        return result if loop.is_running() else loop.run_until_complete(_awaited(result))

    return call


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def deprecated(replacement: str = "") -> Callable[[F], F]:
    """Make a function or class warn, at every use, that it is deprecated and what replaces it."""

    def decorate(target: F) -> F:
        name = f"{target.__module__}.{target.__qualname__}"
        text: Any = f"{name} is deprecated{f'; use {replacement} instead' if replacement else ''}."
        return typing_extensions.deprecated(text, category=FutureWarning)(target)

    return decorate
