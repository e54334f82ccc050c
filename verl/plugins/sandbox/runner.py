"""Start a sandboxed program, enforce its limits, end all its processes, and report how it ended."""

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
from typing import TYPE_CHECKING

from verl.plugins.sandbox.bubblewrap import (
    MIB,
    PROBE,
    PROBE_LIMITS,
    BubblewrapSetup,
    complaint,
    find_setups,
    why_unavailable,
)
from verl.plugins.sandbox.memory_group import MemoryGroup, memory_group
from verl.plugins.sandbox.seccomp import filter_program
from verl.plugins.sandbox.types import Limits, ProgramResult, SandboxError, SandboxUnavailableError, Status, end_of
from verl.plugins.sandbox.watch import RunUsage, descendants
from verl.supervision.prctl import adopt_orphans, adopts_orphans
from verl.supervision.processes import is_stopped

if TYPE_CHECKING:
    from verl.base.types import JsonObject

SAMPLE_EVERY_S = 0.02  # seconds between two readings of the memory in use
REMOVAL_S = 10.0
"""How long the kernel may take to remove the processes of a killed run."""
CHUNK = 1 << 16  # bytes: a pipe of Linux holds as much
ATTEMPTS = 3
"""How often a program is run while its runs are ended by ``SENT_BY_OTHERS`` or stopped by SIGSTOP."""
# Other processes of the machine also send these. A program that sends them to itself does so in every attempt.
SENT_BY_OTHERS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


class Sandbox:
    """Run programs, each in a new sandbox.

    The first instance of a process runs a probe that tries what is forbidden and so tests the isolation.
    Thread-safe.

    Args:
        max_concurrent: concurrent runs, by default the number of cores; further calls wait, and their
            time limits start after that.

    Raises:
        SandboxUnavailableError: this machine cannot isolate programs; the message says what is missing.
    """

    def __init__(self, max_concurrent: int | None = None) -> None:
        self.setup = working_setup()
        self._free = threading.BoundedSemaphore(max_concurrent or os.cpu_count() or 1)

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
        """Run the source text of a Python program until it ends or reaches a limit.

        The program sees the standard library, its standard input (a read-only file) and an empty /tmp.
        When this returns, all its processes have ended.

        Raises:
            SandboxError: the sandbox failed; this says nothing about the program.
        """
        with self._free:
            return run_with_setup(self.setup, program, stdin, limits or Limits())


_probing = threading.Lock()
_working: list[BubblewrapSetup] = []


def working_setup() -> BubblewrapSetup:
    """Return the first setup of the sandbox that passes the probe; found once per process.

    Raises:
        SandboxUnavailableError: none passes.
    """
    with _probing:
        if not _working:
            _working.append(_probe_setups())
        return _working[0]


def _probe_setups() -> BubblewrapSetup:
    ways, missing = find_setups()
    complaints = []
    for setup in ways:
        try:
            problem = complaint(run_with_setup(setup, PROBE, "", PROBE_LIMITS))
        except SandboxError as error:
            problem = str(error)
        if problem is None:
            return setup
        complaints.append(f"{setup.way}: {problem}")
    raise SandboxUnavailableError(missing or why_unavailable(complaints))


class _KilledError(SandboxError):
    """bubblewrap itself was killed, from outside: no sandboxed program can do it."""


def run_with_setup(setup: BubblewrapSetup, program: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run a program in a given setup, again if it was disturbed from outside; see :meth:`Sandbox.run`."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(_KilledError):
            outcome, is_disturbed = _run_once(setup, program, stdin, limits)
            if not is_disturbed:
                return outcome
    return _run_once(setup, program, stdin, limits)[0]


def _run_once(setup: BubblewrapSetup, program: str, stdin: str, limits: Limits) -> tuple[ProgramResult, bool]:
    """Run once; return the result and whether it may have been disturbed from outside."""
    uid = setup.new_uid()
    start = time.monotonic()
    with adopting_orphans(), contextlib.ExitStack() as files:
        source = files.enter_context(sealed_file("program", program.encode("utf-8", "replace")))
        input_ = files.enter_context(sealed_file("stdin", stdin.encode("utf-8", "replace")))
        calls = files.enter_context(sealed_file("filter", filter_program(platform.machine())))
        # Without the right to mount, root has none to move another account's process into a group either.
        group = files.enter_context(memory_group(limits)) if setup.way != "own_uid_user" else None
        status, status_end = os.pipe()
        files.callback(os.close, status)
        try:
            process = start_bubblewrap(
                setup.command(limits, uid, source, calls, status_end),
                input_,
                (source, calls, status_end),
                uid if setup.way == "own_uid_user" else None,
                group,
            )
        finally:
            os.close(status_end)
        with process:
            run = _Run(process, status, limits, start, group)
            outcome = run.finish()
            killed = outcome.status is Status.CRASHED and outcome.signal in SENT_BY_OTHERS
            return outcome, killed or run.was_stopped


def start_bubblewrap(
    command: list[str],
    stdin: int,
    pass_fds: tuple[int, ...],
    uid: int | None,
    group: MemoryGroup | None,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start bubblewrap, under another uid and in a memory cgroup if these are given."""
    groups = [] if uid is not None else None
    try:
        return subprocess.Popen(
            group.joining(command) if group else command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=pass_fds,
            cwd="/",
            env={},
            user=uid,
            group=uid,
            extra_groups=groups,
        )
    except OSError as error:
        raise SandboxError(f"bubblewrap cannot be started: {error}") from error


class StartedSandbox:
    """A started sandbox: its process, its streams, and the end of all its processes.

    Args:
        process: bubblewrap.
        streams: descriptors to read from, by name; ``status`` is the one that bubblewrap writes to.
        limits: limits of the run.
        group: its memory cgroup.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], streams: dict[str, int], limits: Limits, group: MemoryGroup | None
    ) -> None:
        self.process, self.streams, self.limits, self.group = process, streams, limits, group
        self.read: dict[str, bytearray] = {name: bytearray() for name in streams}
        self.usage: RunUsage | None = None
        self.init_fd: int | None = None
        for descriptor in streams.values():
            os.set_blocking(descriptor, False)

    def take(self, name: str) -> bool:
        """Read the available data of a stream; return whether it is closed."""
        try:
            data = os.read(self.streams[name], CHUNK)
        except BlockingIOError:
            return False
        self.read[name] += data
        if name == "status" and self.usage is None and b"\n" in self.read[name]:
            self._read_init_pid()
        return not data

    def is_out_of_memory(self) -> bool:
        """Take a sample of what all processes use; return whether they need more memory than they may."""
        if self.group and self.group.ran_out():
            return True
        if self.usage is None:
            return False
        self.usage.sample(self.limits.memory_mb * MIB)
        return self.usage.peak_memory > self.limits.memory_mb * MIB

    def exit_code(self) -> int | None:
        """Exit code that bubblewrap has reported."""
        return next((line["exit-code"] for line in self._status_lines() if "exit-code" in line), None)

    def end_processes(self) -> None:
        """Kill what is left, and wait until the kernel has ended every process of the pid namespace."""
        self._await_init()
        self.process.kill()
        try:
            self.process.wait(REMOVAL_S)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"bubblewrap still runs {REMOVAL_S} s after it was killed.") from None
        if self.init_fd is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                selector.register(self.init_fd, selectors.EVENT_READ)
                if not selector.select(REMOVAL_S):
                    raise SandboxError(f"a killed program still runs after {REMOVAL_S} s.")
            assert self.usage
            with contextlib.suppress(ChildProcessError):  # other code of this process may have collected it already
                os.waitpid(self.usage.init, os.WNOHANG)
        finally:
            os.close(self.init_fd)
            self.init_fd = None

    def _read_init_pid(self) -> None:
        init = next((line["child-pid"] for line in self._status_lines() if "child-pid" in line), None)
        if init is None:
            return
        self.usage = RunUsage(init)
        with contextlib.suppress(ProcessLookupError):
            self.init_fd = os.pidfd_open(init)

    def _status_lines(self) -> list[JsonObject]:
        return [json.loads(line) for line in bytes(self.read["status"]).splitlines() if line.endswith(b"}")]

    def _await_init(self) -> None:
        """Wait for bubblewrap to report the pid of process 1, without which it can be neither ended nor collected."""
        deadline = time.monotonic() + REMOVAL_S
        while self.usage is None and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
            self.take("status")
        if self.usage is None:
            self.take("status")


class _Run(StartedSandbox):
    """A program that runs to its end, with the output read so far."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status_fd: int,
        limits: Limits,
        start: float,
        group: MemoryGroup | None,
    ) -> None:
        assert process.stdout
        assert process.stderr
        streams = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno(), "status": status_fd}
        super().__init__(process, streams, limits, group)
        self.start = start
        self.ended: Status | None = None
        """The limit at which the run was ended, if it was."""
        self.was_stopped = False
        """Whether one of its processes was stopped (SIGSTOP) at the time limit."""

    def finish(self) -> ProgramResult:
        """Wait until the run ends, or end it at a limit."""
        try:
            with selectors.DefaultSelector() as selector, pidfd(self.process.pid) as process_fd:
                for name, descriptor in self.streams.items():
                    selector.register(descriptor, selectors.EVENT_READ, name)
                selector.register(process_fd, selectors.EVENT_READ, "end")
                self._follow(selector)
        finally:
            self.end_processes()
        for name in self.streams:
            self.take(name)
        return self._outcome()

    def _follow(self, selector: selectors.BaseSelector) -> None:
        next_sample = self.start
        while True:
            left = self.start + self.limits.wall_s - time.monotonic()
            if left <= 0:
                self.ended = Status.TIMEOUT
                family = [self.process.pid, *((self.usage.init, *descendants(self.usage.init)) if self.usage else ())]
                self.was_stopped = any(map(is_stopped, family))
                return
            for key, _ in selector.select(min(left, SAMPLE_EVERY_S)):
                if key.data == "end":
                    return
                if self.take(key.data):
                    selector.unregister(key.fd)
            if self.ended:
                return
            if self.usage and time.monotonic() >= next_sample:
                if self.is_out_of_memory():
                    self.ended = Status.OUT_OF_MEMORY
                    return
                next_sample = time.monotonic() + SAMPLE_EVERY_S

    def take(self, name: str) -> bool:
        """Read as :meth:`StartedSandbox.take` does; end the run if its output is too long."""
        is_closed = super().take(name)
        if name != "status" and len(self.read[name]) > self.limits.max_output_bytes:
            del self.read[name][self.limits.max_output_bytes :]
            self.ended = self.ended or Status.OUTPUT_LIMIT
        return is_closed

    def _outcome(self) -> ProgramResult:
        seconds = time.monotonic() - self.start
        code = self.exit_code()
        if self.ended is None and self.group and self.group.ran_out():
            self.ended = Status.OUT_OF_MEMORY
        stdout, stderr = (bytes(self.read[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        if code is None and self.ended is None:
            if -self.process.returncode in (signal.SIGKILL, signal.SIGTERM):
                name = signal.Signals(-self.process.returncode).name
                raise _KilledError(f"bubblewrap was killed by {name}, in each of {ATTEMPTS} attempts.")
            raise SandboxError(f"bubblewrap failed (exit code {self.process.returncode}): {stderr.strip()[-1000:]}")
        status, signal_name = self._judge(code, stderr)
        return ProgramResult(
            status=status,
            stdout=stdout,
            stderr=stderr,
            seconds=seconds,
            exit_code=code if signal_name is None and self.ended is None else None,
            signal=signal_name,
            peak_memory_mb=round(self.usage.peak_memory / MIB, 1) if self.usage and self.usage.peak_memory else None,
        )

    def _judge(self, code: int | None, stderr: str) -> tuple[Status, str | None]:
        """Status and name of the signal."""
        crowded = self.usage is not None and self.usage.peak_tasks >= self.limits.max_processes
        if self.ended is not None or code is None:
            ended = self.ended or Status.TIMEOUT
            return (Status.TOO_MANY_PROCESSES if crowded and ended is Status.TIMEOUT else ended), None
        status, name = end_of(code, stderr)
        spent = self.usage is not None and self.usage.cpu_s >= self.limits.cpu_s
        if name == "SIGKILL" and spent:  # it ignored SIGXCPU
            return Status.CPU_LIMIT, name
        if status is Status.EXIT_ERROR and crowded:
            return Status.TOO_MANY_PROCESSES, None
        return status, name


_adopting = threading.Lock()
_runs = 0
_adopted_before = False


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of orphaned descendants, until the last of nested and parallel uses has ended."""
    # bubblewrap ends before process 1 of the pid namespace that it made, which then belongs to process 1 of the
    # machine. In a container that is often a program that never collects children: every run would leave a zombie.
    global _runs, _adopted_before
    with _adopting:
        if _runs == 0:
            _adopted_before = adopts_orphans()
            adopt_orphans()
        _runs += 1
    try:
        yield
    finally:
        with _adopting:
            _runs -= 1
            if _runs == 0 and not _adopted_before:
                adopt_orphans(False)


@contextlib.contextmanager
def sealed_file(name: str, content: bytes) -> Iterator[int]:
    """A file in memory, sealed: the sandboxed program, which inherits the descriptor, cannot change it."""
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
def pidfd(pid: int) -> Iterator[int]:
    """Descriptor of a process, which can be read once the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
