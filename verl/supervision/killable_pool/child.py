"""Script that the pool starts: a monitor process, and its child, the worker that calls the function.

A new interpreter runs it with the standard library alone (and psutil in the monitor), so that a worker starts in
milliseconds and inherits no threads, torch or Ray.

The monitor is the worker's parent, so that a function that kills its parent does not kill the training run. When the
worker ends, the run ends, or the run sends SIGTERM, the monitor kills all descendants of the worker, in whichever
process group they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import json
import mmap
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any

HEADER = struct.Struct("<QId")
"""Message header: id of the call (0 in the first, which loads the function), bytes of the body, timeout in s."""
RUNNING = struct.Struct("<Qd")
"""Start of the shared page of an async worker: id of the call whose code runs now (0 for none), and its start."""
TAKEN_BACK = struct.Struct("<QQ")
"""Next on the page, written by the parent: (a, b) takes back all calls with ids up to b, except a."""
PAGE_SIZE = RUNNING.size + TAKEN_BACK.size
CHECK_PAGE = 0
"""Call id of an empty message to an async worker: cancel the calls that the shared page takes back."""
MAX_TEXT = 20_000  # characters of an error's text sent to the parent
__tracebackhide__ = True
CANNOT_FORK = 71
"""Exit code (EX_OSERR) of a monitor that cannot fork its worker, because of the system's limits."""

# Id of the call whose tasks are being created, 0 for none: tasks that a call's function starts belong to the call too.
CALL: contextvars.ContextVar[int] = contextvars.ContextVar("CALL", default=0)


# ---- the monitor ---------------------------------------------------------------------------------


def main() -> None:
    """Run the monitor; arguments: file descriptors of the connection and of the shared page (or -1), parent's pid."""
    connection, page, parent = map(int, sys.argv[1:4])
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from prctl import adopt_orphans, die_with_parent  # by its folder: sys.path need not contain verl yet

    del sys.path[0], sys.modules["prctl"]  # a function may want a package of this name
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until monitor and worker have their own handlers
    signal.signal(signal.SIGTERM, _leave)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    monitor = os.getpid()
    try:
        worker = os.fork()
    except OSError:
        sys.exit(CANNOT_FORK)
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() == monitor:
            _Worker(connection, page).run()
        os._exit(0)
    os.close(connection)
    _end_as(_monitor(worker))


class _LeaveError(Exception):
    """The parent has ended, or ends the worker."""


def _leave(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _LeaveError


def _monitor(worker: int) -> int:
    """Wait for the worker, kill its remaining descendants, and return its wait status."""
    status = signal.SIGTERM.value
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        import psutil  # before it is needed: loading it would delay the end  # noqa: F401

        _, status = os.waitpid(worker, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _LeaveError:
        with contextlib.suppress(ProcessLookupError):  # before its setsid() it has no group of its own
            os.killpg(worker, signal.SIGKILL)
    _end_descendants()
    return status


def _end_descendants() -> None:
    import psutil

    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except psutil.Error:  # it has ended by itself
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end_as(status: int) -> None:
    """End this process with the worker's exit status, which the parent then reads."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.WEXITSTATUS(status))


# ---- the worker ----------------------------------------------------------------------------------


class _Attempt:
    """Context in which untrusted code runs; turns an exception into the reply to send."""

    def __init__(self, fatal: tuple[type[BaseException], ...] = ()) -> None:
        self.fatal = fatal
        self.reply: dict[str, object] = {}

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, GeneratorExit):
            return False
        if isinstance(error, self.fatal):
            error_index = next(n for n, error_type in enumerate(self.fatal) if isinstance(error, error_type))
            self.reply = {"status": "error", "fatal": error_index, "message": str(error)[:MAX_TEXT]}
            return True
        while trace is not None and trace.tb_frame.f_globals.get("__tracebackhide__"):
            trace = trace.tb_next  # leave out the frames of modules that only pass the call on, as pytest does
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        self.reply = {"status": _status_of(error, text), "message": text[-MAX_TEXT:]}
        return True


def _status_of(error: BaseException, text: str) -> str:
    if isinstance(error, MemoryError) or "can't allocate memory" in text[-1000:]:  # the text is torch's RuntimeError
        return "out_of_memory"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "error" if isinstance(error, Exception) else "crashed"


class _Worker:
    """Reads calls from the connection, runs the function, and writes the replies."""

    def __init__(self, connection: int, page: int) -> None:
        self.socket = socket.socket(fileno=connection)
        self.pid = os.getpid()
        self.page = mmap.mmap(page, PAGE_SIZE) if page >= 0 else None
        self.function: Callable[..., object]
        self.fatal: tuple[type[BaseException], ...] = ()

    def run(self) -> None:
        """Load the function, then serve calls until the connection ends."""
        stream = self.socket.makefile("rb")
        _, body = self._read(stream.read)
        start = pickle.loads(body)
        with _Attempt() as attempt:
            sys.path[:] = start["path"]
            sys.argv = sys.argv[:1]  # the others are this program's own
            for module, function, arguments in start["first"]:
                getattr(importlib.import_module(module), function)(*arguments)
            self.function, self.fatal = pickle.loads(start["function"])
            self._limit_memory(start["memory_mb"])  # last, so that a call's memory does not include the imports
        self._send(0, attempt.reply or {"status": "ok", "pid": self.pid, "memory": _memory("VmRSS")})
        if attempt.reply:
            return
        if self.page is not None:
            asyncio.run(self._serve_side_by_side())
            return
        while True:
            call_id, body = self._read(stream.read)
            if not call_id:
                return
            reply = self._call(body)
            if os.getpid() != self.pid:
                os._exit(0)  # a fork of the function's that returned from it
            self._send(call_id, reply)

    def _limit_memory(self, memory_mb: int | None) -> None:
        """Limit the memory beyond the present use; RLIMIT_DATA counts the heap and private mappings."""
        if memory_mb is None or sys.platform != "linux":
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bound = _memory("VmData") + memory_mb * 2**20
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))

    def _call(self, body: bytes) -> dict[str, object]:
        with _Attempt(self.fatal) as attempt:
            value = self.function(**pickle.loads(body))
            if inspect.isawaitable(value):
                value = asyncio.run(_finished(value))
            return {"status": "ok", "value": plain(value)}
        return attempt.reply

    def _read(self, read: Callable[[int], bytes]) -> tuple[int, bytes]:
        header = read(HEADER.size)
        if len(header) < HEADER.size:
            return 0, b""
        call_id, length, _ = HEADER.unpack(header)
        return call_id, read(length)

    def _send(self, call_id: int, reply: Mapping[str, object]) -> None:
        self.socket.sendall(_message(call_id, reply))

    # ---- async functions -------------------------------------------------------------------------

    async def _serve_side_by_side(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        reader, writer = await asyncio.open_connection(sock=self.socket)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                call_id, length, timeout_s = HEADER.unpack(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)  # the parent has ended; a task that ignores its cancellation would delay a normal exit
            if call_id == CHECK_PAGE:
                for task in list(tasks):
                    coroutine = task.get_coro()
                    if isinstance(coroutine, _TrackedCoroutine) and coroutine.is_taken_back():
                        task.cancel()
                continue
            CALL.set(call_id)
            task = loop.create_task(self._call_async(call_id, body, timeout_s, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            CALL.set(0)

    async def _call_async(self, call_id: int, body: bytes, timeout_s: float, writer: asyncio.StreamWriter) -> None:
        with _Attempt(self.fatal) as attempt:
            arguments = pickle.loads(body)
            async with asyncio.timeout(timeout_s):
                value = self.function(**arguments)
                if inspect.isawaitable(value):
                    value = await value
            attempt.reply = {"status": "ok", "value": plain(value)}
        writer.write(_message(call_id, attempt.reply))

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        call_id = CALL.get()
        assert self.page is not None
        return asyncio.Task(
            _TrackedCoroutine(coroutine, call_id, self.page) if call_id else coroutine,
            loop=loop,
            **kwargs,
        )


class _TrackedCoroutine(Coroutine[Any, Any, Any]):
    """Coroutine that records on the shared page when its code runs, and is cancelled when its call is taken back.

    By the page the parent finds the call that blocks the event loop or ends the process. It gives the other calls to
    another process; when the loop is free again, they do not continue here.
    """

    def __init__(self, coroutine: Coroutine[object, object, object], call_id: int, page: mmap.mmap) -> None:
        self.coroutine, self.call_id, self.page = coroutine, call_id, page
        self.was_cancelled = False

    def is_taken_back(self) -> bool:
        """Return whether its call has been taken back; true only the first time, so that it is cancelled once."""
        running_id, last = TAKEN_BACK.unpack_from(self.page, RUNNING.size)
        if self.was_cancelled or self.call_id > last or self.call_id == running_id:
            return False
        self.was_cancelled = True
        return True

    def send(self, value: object) -> object:
        """Run to the next suspension."""
        if self.is_taken_back():
            return self.throw(asyncio.CancelledError())
        return self._step(self.coroutine.send, value)

    def throw(self, *error: object) -> object:
        """Raise inside, and run to the next suspension."""
        return self._step(self.coroutine.throw, *error)

    def close(self) -> None:
        """Close the coroutine."""
        self.coroutine.close()

    def _step(self, step: Callable[..., object], *arguments: object) -> object:
        RUNNING.pack_into(self.page, 0, self.call_id, time.monotonic())
        try:
            return step(*arguments)
        finally:
            # When an exception ends the process, the page keeps the call's id, by which the parent finds it.
            if not isinstance(sys.exc_info()[1], (SystemExit, KeyboardInterrupt)):
                RUNNING.pack_into(self.page, 0, 0, 0.0)

    def __await__(self) -> Generator[object, object, object]:
        return self.coroutine.__await__()


def _message(call_id: int, reply: Mapping[str, object]) -> bytes:
    body = json.dumps(reply).encode()
    return HEADER.pack(call_id, len(body), 0.0) + body


async def _finished(value: Any) -> object:
    """Await a value: ``asyncio.run`` takes coroutines alone."""
    return await value


def _memory(name: str) -> int:
    """A value of ``/proc/self/status`` in bytes; 0 outside Linux."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def plain(value: Any) -> object:
    """Convert a result to JSON values; arrays and tensors become numbers and lists of numbers.

    Raises:
        TypeError: a value of it has no such form.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        # float() raises an OverflowError for larger integers, so that the call fails here and not in its reader.
        return int(value) if int(value).bit_length() <= 1024 else float(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return plain(value.tolist())
    raise TypeError(
        f"the function returned {type(value).__name__} {value!r:.100}. What it returns travels between processes: "
        "return numbers, texts, None, arrays, and lists and dicts of them."
    )


if __name__ == "__main__":
    main()
