"""Start a program behind the walls, watch it, end it, and say how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from verl.utils.sandbox.bubblewrap import MIB, Walls, find_walls, why_unavailable
from verl.utils.sandbox.probe import PROBE, PROBE_LIMITS, complaint
from verl.utils.sandbox.reaper import collect, orphans_come_here
from verl.utils.sandbox.seccomp import filter_program
from verl.utils.sandbox.types import Limits, Outcome, SandboxError, SandboxUnavailableError, Status, end_of
from verl.utils.sandbox.watch import Watch, descendants, is_stopped

LOOK_EVERY_S = 0.02
LAST_BREATH_S = 10.0
"""How long the kernel may take to clear away a killed run."""
CHUNK = 1 << 16
ATTEMPTS = 3
"""A run that a signal ended, or held, which others can send as well as the program itself, is made again: a program
that does it by its own hand does so every time."""
SENT_BY_OTHERS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


class Sandbox:
    """Runs programs, each in a sandbox of its own that ends with it.

    Building one proves the walls: a probe program tries to do what is forbidden. The proof is made once
    per process. Instances may be used from many threads.

    Args:
        max_concurrent: runs at once; further calls wait, which their time limits do not count. Default:
            the number of cores.

    Raises:
        SandboxUnavailableError: no sandbox can be built here; the message says what is missing.
    """

    def __init__(self, max_concurrent: int | None = None) -> None:
        self.walls = proven_walls()
        self._free = threading.BoundedSemaphore(max_concurrent or os.cpu_count() or 1)

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a Python program to its end or to its limits.

        The program finds the standard library, its standard input, an empty /tmp, and nothing else of
        this machine. When this returns, all its processes are gone.

        Args:
            program: source text.
            stdin: its standard input, a file it cannot write to.
            limits: what it may use; default :class:`Limits`.

        Raises:
            SandboxError: the sandbox failed, so that the program has not been judged.
        """
        with self._free:
            return run_behind(self.walls, program, stdin, limits or Limits())


_proof = threading.Lock()
_proven: list[Walls] = []


def proven_walls() -> Walls:
    """The first way to build the sandbox here whose walls hold against the probe.

    Raises:
        SandboxUnavailableError: none does.
    """
    with _proof:
        if not _proven:
            _proven.append(_prove())
        return _proven[0]


def _prove() -> Walls:
    ways, missing = find_walls()
    complaints = []
    for walls in ways:
        try:
            found = complaint(run_behind(walls, PROBE, "", PROBE_LIMITS))
        except SandboxError as error:
            found = str(error)
        if found is None:
            return walls
        complaints.append(f"{walls.way}: {found}")
    raise SandboxUnavailableError(missing or why_unavailable(complaints))


class _KilledError(SandboxError):
    """bubblewrap itself was killed, which no program can do."""


def run_behind(walls: Walls, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program behind given walls; see :meth:`Sandbox.run`."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(_KilledError):
            outcome, is_disturbed = _run_once(walls, program, stdin, limits)
            if not is_disturbed:
                return outcome
    return _run_once(walls, program, stdin, limits)[0]


def _run_once(walls: Walls, program: str, stdin: str, limits: Limits) -> tuple[Outcome, bool]:
    """What came of one run, and whether it may have been disturbed from outside."""
    uid = walls.new_uid()
    start = time.monotonic()
    with orphans_come_here(), contextlib.ExitStack() as files:
        source = files.enter_context(_sealed_file("program", program.encode("utf-8", "replace")))
        input_ = files.enter_context(_sealed_file("stdin", stdin.encode("utf-8", "replace")))
        calls = files.enter_context(_sealed_file("filter", filter_program(platform.machine())))
        status, status_end = os.pipe()
        files.callback(os.close, status)
        try:
            process = _start(
                walls.command(limits, uid, source, calls, status_end),
                input_,
                (source, calls, status_end),
                uid if walls.way == "own_uid_user" else None,
            )
        finally:
            os.close(status_end)
        with process:
            run = _Run(process, status, limits, start)
            outcome = run.finish()
            killed = outcome.status is Status.CRASHED and outcome.signal in SENT_BY_OTHERS
            return outcome, killed or run.was_stopped


def _start(command: list[str], stdin: int, pass_fds: tuple[int, ...], uid: int | None) -> subprocess.Popen[bytes]:
    """Start bubblewrap, under another uid if one is given."""
    groups = [] if uid is not None else None
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            cwd="/",
            env={},
            user=uid,
            group=uid,
            extra_groups=groups,
        )
    except OSError as error:
        raise SandboxError(f"bubblewrap cannot be started: {error}") from error


class _Run:
    """One started sandbox, until its end."""

    def __init__(self, process: subprocess.Popen[bytes], status_fd: int, limits: Limits, start: float) -> None:
        assert process.stdout
        assert process.stderr
        self.process, self.limits, self.start = process, limits, start
        self.streams = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno(), "status": status_fd}
        self.read: dict[str, bytearray] = {name: bytearray() for name in self.streams}
        self.watch: Watch | None = None
        self.init_fd: int | None = None
        self.ended: Status | None = None
        """Why we ended it, if we did."""
        self.was_stopped = False
        """A process of it was stopped (SIGSTOP) when its time was up."""

    def finish(self) -> Outcome:
        """Watch the run until it ends, or end it at a limit."""
        try:
            with selectors.DefaultSelector() as selector, _pidfd(self.process.pid) as own:
                for name, descriptor in self.streams.items():
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ, name)
                selector.register(own, selectors.EVENT_READ, "end")
                self._follow(selector)
        finally:
            self._clear_away()
        for name in self.streams:
            self._take(name)
        return self._outcome()

    def _follow(self, selector: selectors.BaseSelector) -> None:
        next_look = self.start
        while True:
            left = self.start + self.limits.wall_s - time.monotonic()
            if left <= 0:
                self.ended = Status.TIMEOUT
                family = [self.process.pid, *((self.watch.init, *descendants(self.watch.init)) if self.watch else ())]
                self.was_stopped = any(map(is_stopped, family))
                return
            for key, _ in selector.select(min(left, LOOK_EVERY_S)):
                if key.data == "end":
                    return
                if self._take(key.data):
                    selector.unregister(key.fd)
            if self.ended:
                return
            if self.watch and time.monotonic() >= next_look:
                self.watch.look(self.limits.memory_mb * MIB)
                next_look = time.monotonic() + LOOK_EVERY_S
                if self.watch.peak_memory > self.limits.memory_mb * MIB:
                    self.ended = Status.OUT_OF_MEMORY
                    return

    def _take(self, name: str) -> bool:
        """Read what a stream has; return whether it is closed."""
        try:
            data = os.read(self.streams[name], CHUNK)
        except BlockingIOError:
            return False
        held = self.read[name]
        held += data
        if name == "status" and self.watch is None and b"\n" in held:
            self._meet_init()
        if name != "status" and len(held) > self.limits.max_output_bytes:
            del held[self.limits.max_output_bytes :]
            self.ended = self.ended or Status.OUTPUT_LIMIT
        return not data

    def _meet_init(self) -> None:
        init = next((line["child-pid"] for line in self._status_lines() if "child-pid" in line), None)
        if init is None:
            return
        self.watch = Watch(init)
        with contextlib.suppress(ProcessLookupError):
            self.init_fd = os.pidfd_open(init)

    def _status_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in bytes(self.read["status"]).splitlines() if line.endswith(b"}")]

    def _clear_away(self) -> None:
        """End whatever is left, and wait until the kernel has ended every process of the pid namespace."""
        self._await_init()
        self.process.kill()
        try:
            self.process.wait(LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"bubblewrap still runs {LAST_BREATH_S} s after it was killed.") from None
        if self.init_fd is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                selector.register(self.init_fd, selectors.EVENT_READ)
                if not selector.select(LAST_BREATH_S):
                    raise SandboxError(f"a killed program still runs after {LAST_BREATH_S} s; the machine is not well.")
            assert self.watch
            collect(self.watch.init)
        finally:
            os.close(self.init_fd)
            self.init_fd = None

    def _await_init(self) -> None:
        """Let bubblewrap say who process 1 is, which only then can be ended and collected, however short the time."""
        deadline = time.monotonic() + LAST_BREATH_S
        while self.watch is None and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
            self._take("status")
        if self.watch is None:
            self._take("status")

    def _outcome(self) -> Outcome:
        seconds = time.monotonic() - self.start
        code = next((line["exit-code"] for line in self._status_lines() if "exit-code" in line), None)
        stdout, stderr = (bytes(self.read[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        if code is None and self.ended is None:
            if -self.process.returncode in (signal.SIGKILL, signal.SIGTERM):
                name = signal.Signals(-self.process.returncode).name
                raise _KilledError(f"bubblewrap was killed by {name}, in each of {ATTEMPTS} attempts.")
            raise SandboxError(f"bubblewrap failed (exit code {self.process.returncode}): {stderr.strip()[-1000:]}")
        status, signal_name = self._judge(code, stderr)
        return Outcome(
            status=status,
            stdout=stdout,
            stderr=stderr,
            seconds=seconds,
            exit_code=code if signal_name is None and self.ended is None else None,
            signal=signal_name,
            peak_memory_mb=round(self.watch.peak_memory / MIB, 1) if self.watch and self.watch.peak_memory else None,
        )

    def _judge(self, code: int | None, stderr: str) -> tuple[Status, str | None]:
        """Status and name of the signal."""
        crowded = self.watch is not None and self.watch.peak_tasks >= self.limits.max_processes
        if self.ended is not None or code is None:
            ended = self.ended or Status.TIMEOUT
            return (Status.TOO_MANY_PROCESSES if crowded and ended is Status.TIMEOUT else ended), None
        status, name = end_of(code, stderr)
        spent = self.watch is not None and self.watch.cpu_s >= self.limits.cpu_s
        if name == "SIGKILL" and spent:  # it did not listen to SIGXCPU
            return Status.CPU_LIMIT, name
        if status is Status.EXIT_ERROR and crowded:
            return Status.TOO_MANY_PROCESSES, None
        return status, name


@contextlib.contextmanager
def _sealed_file(name: str, content: bytes) -> Iterator[int]:
    """A file in memory that nobody can change any more, not even through the descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
