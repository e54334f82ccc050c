"""Limits of a sandboxed run, its result, and the errors of the sandbox."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from verl.errors import RewardError

SMALLEST_MEMORY_MB = 64
"""Least memory with which a Python interpreter starts."""


class SandboxError(RewardError):
    """The sandbox itself failed; this says nothing about the program."""


class SandboxUnavailableError(SandboxError):
    """Programs cannot be isolated on this machine; the message says what is missing."""


class Status(StrEnum):
    """How a program ended; only ``OK`` is a success. A failure of the sandbox is a :class:`SandboxError` instead."""

    OK = "ok"
    """Exit code 0."""
    EXIT_ERROR = "exit_error"
    """Another exit code: an uncaught exception, a syntax error, ``sys.exit(3)``."""
    TIMEOUT = "timeout"
    """It ran longer than ``wall_s``."""
    CPU_LIMIT = "cpu_limit"
    """One of its processes used more CPU time than ``cpu_s``."""
    OUT_OF_MEMORY = "out_of_memory"
    """One of its processes, or all together, needed more memory than ``memory_mb``."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than ``max_output_bytes`` to stdout or stderr."""
    TOO_MANY_PROCESSES = "too_many_processes"
    """It failed or timed out while it had as many processes or threads as ``max_processes`` allows."""
    CRASHED = "crashed"
    """A signal ended it: a segmentation fault, a stack overflow in C, a signal that it sent to itself."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one run.

    Raises:
        ValueError: a limit is not positive, or the memory is too small to start an interpreter.
    """

    wall_s: float = 12.0
    """Wall-clock seconds."""
    cpu_s: int = 6
    """Seconds of CPU time per process."""
    memory_mb: int = 1024
    """MiB of address space of each process; also of the resident memory and page tables of all processes together plus
    1 KiB for each file that they have made, sampled every 20 ms."""
    max_processes: int = 16
    """Concurrent processes and threads, the program itself included."""
    max_output_bytes: int = 1 << 20
    """Bytes of stdout and of stderr, each."""
    max_files_mb: int = 64
    """MiB of files in /tmp, and as many in /dev/shm; both are in memory."""
    max_open_files: int = 64
    """Open files per process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"Limits({name}={value}): it must be greater than 0.")
        if self.memory_mb < SMALLEST_MEMORY_MB:
            raise ValueError(
                f"Limits(memory_mb={self.memory_mb}): an interpreter needs at least {SMALLEST_MEMORY_MB} MiB to start."
            )


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Result of a run."""

    status: Status
    stdout: str
    """At most ``max_output_bytes``; bytes that are not UTF-8 become U+FFFD."""
    stderr: str
    """As ``stdout``."""
    seconds: float
    """Wall-clock time from the start of the sandbox to the end of its last process."""
    exit_code: int | None = None
    """None if a signal or a limit ended the program."""
    signal: str | None = None
    """Name of the signal that ended it, such as ``SIGSEGV``."""
    peak_memory_mb: float | None = None
    """Largest sampled resident memory of all its processes together; None if the run was too short to be sampled."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status is Status.OK

    @property
    def reason(self) -> str:
        """Status, exit code or signal, and last line of stderr: ``exit_error (1): ValueError: no number``."""
        last = last_line(self.stderr)
        detail = f" ({self.signal or self.exit_code})" if self.signal or self.exit_code else ""
        return f"{self.status}{detail}{': ' + last if last and not self.ok else ''}"


# Python's errors where the kernel allows no further process or thread: fork() fails with EAGAIN.
_REFUSED_PROCESS = ("BlockingIOError: [Errno 11]", "RuntimeError: can't start new thread")


def end_of(exit_code: int, stderr: str) -> tuple[Status, str | None]:
    """Derive status and signal name of a program that was not ended at a limit."""
    if exit_code == 0:
        return Status.OK, None
    # Shells and bubblewrap report a signal as 128 + its number.
    if exit_code > 128 and exit_code - 128 in set(signal.Signals):
        name = signal.Signals(exit_code - 128).name
        return (Status.CPU_LIMIT if name == "SIGXCPU" else Status.CRASHED), name
    # When the kernel refuses memory or processes, a Python program gets an exception, which its stderr ends with.
    # Output of several processes is mixed, so a refused process is searched in all lines.
    last = last_line(stderr)
    if last.startswith("MemoryError"):
        return Status.OUT_OF_MEMORY, None
    if any(line.startswith(_REFUSED_PROCESS) for line in stderr.splitlines()):
        return Status.TOO_MANY_PROCESSES, None
    return Status.EXIT_ERROR, None


def last_line(text: str) -> str:
    """Last non-empty line, at most 500 characters; in a traceback it is the exception."""
    return next((line.strip()[:500] for line in reversed(text.splitlines()) if line.strip()), "")
