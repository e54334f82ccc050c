r"""A Python interpreter in a sandbox that keeps its variables from one piece of code to the next.

with Interpreter() as interpreter:
    interpreter.run("x = 6")
    interpreter.run("x * 7").stdout                # "42\n"
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import selectors
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl.plugins.sandbox import cells
from verl.plugins.sandbox.bubblewrap import BubblewrapSetup
from verl.plugins.sandbox.memory_group import memory_group
from verl.plugins.sandbox.runner import (
    SAMPLE_EVERY_S,
    StartedSandbox,
    adopting_orphans,
    pidfd,
    sealed_file,
    start_bubblewrap,
    working_setup,
)
from verl.plugins.sandbox.seccomp import filter_program
from verl.plugins.sandbox.types import Limits, ProgramResult, SandboxError, Status, end_of

START_S = 30.0
"""How long an interpreter may take to start on a busy machine."""
LONGEST_CELL = 1 << 20
"""Bytes of a piece of code."""


class Interpreter:
    """A sandboxed process that runs pieces of code, each with what those before it have defined.

    It starts at the first :meth:`run`. A piece of code that reaches a limit, or ends the process, ends the interpreter
    with all its processes, and the next one starts a new one. Thread-safe; one piece of code runs at a time.

    Args:
        limits: of one piece of code (``wall_s``, ``max_output_bytes``), and of all of them together (the others).

    Raises:
        SandboxUnavailableError: this machine cannot isolate programs; the message says what is missing.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(cpu_s=60)
        self._setup = working_setup()
        self._lock = threading.Lock()
        self._process: _InterpreterProcess | None = None
        self._is_closed = False

    def run(self, code: str) -> ProgramResult:
        """Run a piece of code. What it writes and the value of its last expression are in ``stdout``.

        After an uncaught exception the status is ``exit_error`` and variables stay; :func:`keeps_variables` tells
        whether the code has ended the interpreter. Of a long output the beginning and the end are kept.

        Raises:
            SandboxError: the sandbox failed, or the interpreter is closed.
        """
        data = code.encode("utf-8", "replace")
        if len(data) > LONGEST_CELL:
            text = f"the code has {len(data)} bytes; {LONGEST_CELL} are allowed\n"
            return ProgramResult(status=Status.EXIT_ERROR, stdout=text, stderr="", seconds=0.0)
        with self._lock:
            if self._is_closed:
                raise SandboxError("the interpreter is closed.")
            if self._process is None:
                # bubblewrap ends with the thread that has started it, so that must be one that stays.
                self._process = _starter().submit(_InterpreterProcess, self._setup, self.limits).result()
            goes_on = False
            try:
                result = self._process.run(data)
                goes_on = keeps_variables(result)
            finally:
                if not goes_on:
                    self._end()
            return result

    def close(self) -> None:
        """End all processes; code that still runs is ended too, and its :meth:`run` returns that as its result."""
        self._is_closed = True
        if process := self._process:
            process.process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def keeps_variables(result: ProgramResult) -> bool:
    """Whether the interpreter goes on after a piece of code with this result."""
    return result.status in (Status.OK, Status.EXIT_ERROR) and result.exit_code is None


class _InterpreterProcess(StartedSandbox):
    """One process of an interpreter, with the pipes to and from it."""

    def __init__(self, setup: BubblewrapSetup, limits: Limits) -> None:
        uid = setup.new_uid()
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            mine.enter_context(adopting_orphans())
            group = mine.enter_context(memory_group(limits)) if setup.way != "own_uid_user" else None
            source = theirs.enter_context(sealed_file("cells", Path(cells.__file__).read_bytes()))
            calls = theirs.enter_context(sealed_file("filter", filter_program(platform.machine())))
            (requests, request_end), (answers, answer_end), (status, status_end) = (os.pipe() for _ in range(3))
            for descriptor in (request_end, answers, status):
                mine.callback(os.close, descriptor)
            for descriptor in (requests, answer_end, status_end):
                theirs.callback(os.close, descriptor)
            process = start_bubblewrap(
                [*setup.command(limits, uid, source, calls, status_end), str(answer_end)],
                requests,
                (source, calls, status_end, answer_end),
                uid if setup.way == "own_uid_user" else None,
                group,
                stderr=subprocess.STDOUT,  # a model reads both in the order in which they were written
            )
            assert process.stdout
            mine.callback(process.stdout.close)
            streams = {"stdout": process.stdout.fileno(), "answers": answers, "status": status}
            super().__init__(process, streams, limits, group)
            mine.callback(self.end_processes)
            self._requests = request_end
            os.set_blocking(request_end, False)
            self._output = _HeadAndTail(limits.max_output_bytes)
            ended = self._follow(b"", START_S)
            if ended is not None or self.read["answers"] != b".":
                raise SandboxError(f"the interpreter cannot be started ({ended}): {self._output.text()[-1000:]}")
            self._held = mine.pop_all()

    def run(self, code: bytes) -> ProgramResult:
        """Run a piece of code."""
        start = time.monotonic()
        self._output = _HeadAndTail(self.limits.max_output_bytes)
        with contextlib.suppress(BlockingIOError):
            while os.read(self.streams["answers"], 1):
                pass  # only the answers to this piece count
        self.read["answers"].clear()
        ended = self._follow(len(code).to_bytes(4, "big") + code, self.limits.wall_s)
        status, signal_name, exit_code = ended or Status.OK, None, None
        if ended is None and self.read["answers"][:1] != b"+":
            status = Status.EXIT_ERROR
        elif ended is Status.CRASHED:
            self.end_processes()
            self.take("status")
            reported = self.exit_code()
            exit_code = 137 if reported is None else reported  # 128 + SIGKILL: bubblewrap itself was killed
            status, signal_name = end_of(exit_code, "")
            status = Status.EXIT_ERROR if status is Status.OK else status
            exit_code = None if signal_name else exit_code
        return ProgramResult(
            status=status,
            stdout=self._output.text(),
            stderr="",
            seconds=time.monotonic() - start,
            exit_code=exit_code,
            signal=signal_name,
        )

    def close(self) -> None:
        """End all processes."""
        self._held.close()

    def _follow(self, request: bytes, wall_s: float) -> Status | None:
        """Send a request and read until its answer; return the limit at which it ended, ``CRASHED`` if the process did.

        The answer is written after the output, so that what the pipe then holds is all of it.
        """
        deadline, next_sample = time.monotonic() + wall_s, 0.0
        with selectors.DefaultSelector() as selector, pidfd(self.process.pid) as process_fd:
            for name, descriptor in self.streams.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            selector.register(process_fd, selectors.EVENT_READ, "end")
            if request:
                selector.register(self._requests, selectors.EVENT_WRITE, "requests")
            while (now := time.monotonic()) < deadline:
                for key, _ in selector.select(min(deadline - now, SAMPLE_EVERY_S)):
                    if key.data == "end":
                        self._drain()
                        return Status.OUT_OF_MEMORY if self.group and self.group.ran_out() else Status.CRASHED
                    if key.data == "requests":
                        with contextlib.suppress(
                            BlockingIOError, BrokenPipeError
                        ):  # if it has ended, its pidfd says so
                            request = request[os.write(self._requests, request) :]
                        if not request:
                            selector.unregister(key.fd)
                    elif self.take(key.data):
                        selector.unregister(key.fd)
                if self.read["answers"]:
                    self._drain()
                    return None
                if time.monotonic() >= next_sample:
                    if self.is_out_of_memory():
                        return Status.OUT_OF_MEMORY
                    next_sample = time.monotonic() + SAMPLE_EVERY_S
        return Status.TIMEOUT

    def take(self, name: str) -> bool:
        """Read as :meth:`StartedSandbox.take` does; of the output keep what may be kept."""
        is_closed = super().take(name)
        if name == "stdout":
            self._output.add(self.read[name])
            self.read[name].clear()
        return is_closed

    def _drain(self) -> None:
        """Read the output that the pipe holds."""
        # A process that a cell has left behind may write on and on.
        for _ in range(64):
            before = self._output.size
            self.take("stdout")
            if self._output.size == before:
                return


class _HeadAndTail:
    """Buffer that keeps the beginning and the end of a stream, ``most`` bytes together."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0

    def add(self, data: bytes | bytearray) -> None:
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return the stream, or its beginning and end with the number of bytes left out between them."""
        tail = self._tail[-self._half :]
        left_out = self.size - len(self._head) - len(tail)
        gap = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return bytes(self._head + gap + tail).decode("utf-8", "replace")


@functools.cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox starter")


os.register_at_fork(after_in_child=_starter.cache_clear)  # a fork has no threads
