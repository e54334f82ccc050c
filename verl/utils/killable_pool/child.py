"""What runs on the other side of the pool: a keeper, and below it the worker that calls the function.

The file is started as a script by a clean interpreter and needs nothing but the standard library (and
psutil in the keeper), so that a worker is there in milliseconds and holds no threads, no torch and no
Ray of its parent.

The keeper is the worker's parent, so a function that kills its parent meets the keeper and not the
training run. When the worker ends, or the run ends, or the run says so (SIGTERM), the keeper kills
whatever the worker has started, whether it left its process group or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
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
"""Before every message: number of the job, length of the body, seconds that the job has; the first one is no job."""
RUNNING = struct.Struct("<Qd")
"""On the shared page of async workers: the job whose code runs now (0 for none), and since when."""
TAKEN_BACK = struct.Struct("<QQ")
"""Behind it, written by the parent: all jobs up to the second number are taken back, but for the job of the first."""
PAGE_SIZE = RUNNING.size + TAKEN_BACK.size
LOOK = 0
"""The number of a message without a body that says: look at the page."""
MAX_TEXT = 20_000
NO_ROOM = 71
"""Exit code of a keeper that cannot start its worker: the system has no room for one more process (EX_OSERR)."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

JOB: contextvars.ContextVar[int] = contextvars.ContextVar("JOB", default=0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- the keeper ----------------------------------------------------------------------------------


def main() -> None:
    """Arguments: the connection's file descriptor, the shared page's (or -1), the parent's process id."""
    connection, page, parent = map(int, sys.argv[1:4])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until each of the two can tell what it means
    signal.signal(signal.SIGTERM, _leave)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper = os.getpid()
    try:
        worker = os.fork()
    except OSError:
        sys.exit(NO_ROOM)
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            _Worker(connection, page).run()
        os._exit(0)
    os.close(connection)
    _end_as(_keep(worker))


class _LeaveError(Exception):
    """The parent is gone, or wants the worker to end."""


def _leave(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _LeaveError


def _keep(worker: int) -> int:
    """Wait for the worker, then end what is left of it; returns its wait status."""
    status = signal.SIGTERM.value
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        import psutil  # now, for there may be no time later  # noqa: F401

        _, status = os.waitpid(worker, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _LeaveError:
        with contextlib.suppress(ProcessLookupError):  # it is so young that it has no group yet
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
    """End this process as the worker ended, so that the parent reads its exit status here."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


# ---- the worker ----------------------------------------------------------------------------------


class _Attempt:
    """Runs foreign code and keeps how it ended, as the reply to send."""

    def __init__(self, fatal: tuple[type[BaseException], ...] = ()) -> None:
        self.fatal = fatal
        self.reply: dict[str, Any] = {}

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, GeneratorExit):
            return False
        if isinstance(error, self.fatal):
            number = next(n for n, wanted in enumerate(self.fatal) if isinstance(error, wanted))
            self.reply = {"status": "error", "fatal": number, "message": str(error)[:MAX_TEXT]}
            return True
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # the caller's frames say nothing about the function
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        self.reply = {"status": _status_of(error, text), "message": text[-MAX_TEXT:]}
        return True


def _status_of(error: BaseException, text: str) -> str:
    if isinstance(error, MemoryError) or "can't allocate memory" in text[-1000:]:  # the second is torch's
        return "out_of_memory"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "error" if isinstance(error, Exception) else "crashed"


class _Worker:
    """Reads jobs from the connection, calls the function, writes what came of each."""

    def __init__(self, connection: int, page: int) -> None:
        self.socket = socket.socket(fileno=connection)
        self.pid = os.getpid()
        self.page = mmap.mmap(page, PAGE_SIZE) if page >= 0 else None
        self.function: Callable[..., Any]
        self.fatal: tuple[type[BaseException], ...] = ()

    def run(self) -> None:
        """Start, then serve until the connection ends."""
        stream = self.socket.makefile("rb")
        _, body = self._read(stream.read)
        start = pickle.loads(body)
        with _Attempt() as attempt:
            self._load(start)
            self._limit_memory(start["memory_mb"])
        self._send(0, attempt.reply or {"status": "ok", "pid": self.pid, "memory": _memory("VmRSS")})
        if attempt.reply:
            return
        if self.page is not None:
            asyncio.run(self._serve_side_by_side())
            return
        while True:
            number, body = self._read(stream.read)
            if not number:
                return
            reply = self._call(body)
            if os.getpid() != self.pid:
                os._exit(0)  # a copy that the function forked and that came back
            self._send(number, reply)

    def _load(self, start: Mapping[str, Any]) -> None:
        sys.path[:] = start["path"]
        sys.argv = sys.argv[:1]
        for module, function, arguments in start["first"]:
            getattr(importlib.import_module(module), function)(*arguments)
        self.function, self.fatal = pickle.loads(start["function"])

    def _limit_memory(self, memory_mb: int | None) -> None:
        """Bound what calls may take on top of what is there now; RLIMIT_DATA counts heap and private maps."""
        if memory_mb is None or sys.platform != "linux":
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bound = _memory("VmData") + memory_mb * 2**20
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))

    def _call(self, body: bytes) -> dict[str, Any]:
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
        number, length, _ = HEADER.unpack(header)
        return number, read(length)

    def _send(self, number: int, reply: Mapping[str, Any]) -> None:
        self.socket.sendall(_message(number, reply))

    # ---- async functions -------------------------------------------------------------------------

    async def _serve_side_by_side(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        reader, writer = await asyncio.open_connection(sock=self.socket)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                number, length, timeout_s = HEADER.unpack(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)  # the parent is gone; a function that ignores its cancellation would keep us
            if number == LOOK:
                for task in list(tasks):
                    if (watched := task.get_coro()) and isinstance(watched, _Watched) and watched.must_leave():
                        task.cancel()
                continue
            JOB.set(number)
            task = loop.create_task(self._call_async(number, body, timeout_s, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            JOB.set(0)

    async def _call_async(self, number: int, body: bytes, timeout_s: float, writer: asyncio.StreamWriter) -> None:
        with _Attempt(self.fatal) as attempt:
            arguments = pickle.loads(body)
            async with asyncio.timeout(timeout_s):
                value = self.function(**arguments)
                if inspect.isawaitable(value):
                    value = await value
            attempt.reply = {"status": "ok", "value": plain(value)}
        writer.write(_message(number, attempt.reply))

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        number = JOB.get()
        assert self.page is not None
        return asyncio.Task(
            _Watched(coroutine, number, self.page) if number else coroutine,
            loop=loop,
            **kwargs,
        )


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that says on the shared page when its code runs, and is cancelled when its job is taken back.

    So the parent knows which of many jobs blocks the event loop or ends the process; and none of the others, which
    another process does by then, goes on here when the loop is free again.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, page: mmap.mmap) -> None:
        self.coroutine, self.number, self.page = coroutine, number, page
        self.was_told = False

    def must_leave(self) -> bool:
        """Whether its job has been taken back; said once, as what it does on its way out is its own affair."""
        kept, last = TAKEN_BACK.unpack_from(self.page, RUNNING.size)
        if self.was_told or self.number > last or self.number == kept:
            return False
        self.was_told = True
        return True

    def send(self, value: Any) -> Any:
        """Run to the next suspension."""
        if self.must_leave():
            return self.throw(asyncio.CancelledError())
        return self._step(self.coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise inside, and run to the next suspension."""
        return self._step(self.coroutine.throw, *error)

    def close(self) -> None:
        """Give up."""
        self.coroutine.close()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        RUNNING.pack_into(self.page, 0, self.number, time.monotonic())
        try:
            return step(*arguments)
        finally:
            # What ends the whole process stays on the page: it says whose doing it was.
            if not isinstance(sys.exc_info()[1], (SystemExit, KeyboardInterrupt)):
                RUNNING.pack_into(self.page, 0, 0, 0.0)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.coroutine.__await__()


def _message(number: int, reply: Mapping[str, Any]) -> bytes:
    body = json.dumps(reply).encode()
    return HEADER.pack(number, len(body), 0.0) + body


async def _finished(value: Any) -> Any:
    return await value


def _memory(name: str) -> int:
    """A line of ``/proc/self/status`` in bytes; 0 where there is no such file."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def plain(value: Any) -> Any:
    """A result as JSON has it; arrays and tensors become numbers and lists of numbers.

    Raises:
        TypeError: it holds something else.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value) if int(value).bit_length() <= 1024 else float(value)  # beyond, an OverflowError
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
