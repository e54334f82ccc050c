"""What a sandbox is asked and what it answers."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from verl.errors import RewardError

SMALLEST_MEMORY_MB = 64
"""An interpreter does not start below it."""


class SandboxError(RewardError):
    """The sandbox itself failed; the program has not been judged."""


class SandboxUnavailableError(SandboxError):
    """No sandbox can be built on this machine; the message says what is missing."""


class Status(StrEnum):
    """How a program ended. Only the first is a success; all are facts about the program, not about the sandbox."""

    OK = "ok"
    """It ended by itself with exit code 0."""
    EXIT_ERROR = "exit_error"
    """It ended by itself with another exit code: an exception that nobody caught, a syntax error, ``sys.exit(3)``."""
    TIMEOUT = "timeout"
    """It ran longer than ``wall_s``."""
    CPU_LIMIT = "cpu_limit"
    """One of its processes computed longer than ``cpu_s``."""
    OUT_OF_MEMORY = "out_of_memory"
    """It asked for more memory than ``memory_mb``: one process of it, or all together."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than ``max_output_bytes`` to stdout or stderr."""
    TOO_MANY_PROCESSES = "too_many_processes"
    """It ended, or was ended, while it had as many processes or threads as ``max_processes`` allows."""
    CRASHED = "crashed"
    """A signal ended it: a segmentation fault, a stack overflow in C, a kill by its own hand."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use.

    Raises:
        ValueError: a limit is not positive, or there is too little memory to start an interpreter.
    """

    wall_s: float = 12.0
    """Seconds by the clock."""
    cpu_s: int = 6
    """Seconds of computing by one process."""
    memory_mb: int = 1024
    """MiB of address space of one process, and of resident memory of all together with 1 KiB for each file that they
    have made (looked at every 20 ms)."""
    max_processes: int = 16
    """Processes and threads at once, the program itself included."""
    max_output_bytes: int = 1 << 20
    """Bytes on stdout, and as many on stderr."""
    max_files_mb: int = 64
    """MiB of files, all of which lie in /tmp and in memory."""
    max_open_files: int = 64
    """Open files of one process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"Limits({name}={value}): it must be greater than 0.")
        if self.memory_mb < SMALLEST_MEMORY_MB:
            raise ValueError(
                f"Limits(memory_mb={self.memory_mb}): an interpreter needs at least {SMALLEST_MEMORY_MB} MiB to start."
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did."""

    status: Status
    stdout: str
    """At most ``max_output_bytes`` of it; bytes that are not UTF-8 become U+FFFD."""
    stderr: str
    """Likewise."""
    seconds: float
    """By the clock, from the start of the sandbox to the end of its last process."""
    exit_code: int | None = None
    """Exit code, where the program ended by itself."""
    signal: str | None = None
    """Name of the signal that ended it, such as ``SIGSEGV``."""
    peak_memory_mb: float | None = None
    """Largest resident memory seen in all its processes together; None for a run too short to be looked at."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status is Status.OK

    @property
    def reason(self) -> str:
        """The status, with what belongs to it: ``exit_error (1): ValueError: no number``."""
        last = last_line(self.stderr)
        detail = f" ({self.signal or self.exit_code})" if self.signal or self.exit_code else ""
        return f"{self.status}{detail}{': ' + last if last and not self.ok else ''}"


_REFUSED_PROCESS = ("BlockingIOError: [Errno 11]", "RuntimeError: can't start new thread")


def end_of(exit_code: int, stderr: str) -> tuple[Status, str | None]:
    """Status, and the name of the signal, of a program that nobody stopped.

    Shells and bubblewrap report a signal as 128 + its number. Memory and processes that the kernel refused
    reach a Python program as exceptions, with which its stderr then ends; those of several processes are mixed.
    """
    if exit_code == 0:
        return Status.OK, None
    if exit_code > 128 and exit_code - 128 in set(signal.Signals):
        name = signal.Signals(exit_code - 128).name
        return (Status.CPU_LIMIT if name == "SIGXCPU" else Status.CRASHED), name
    last = last_line(stderr)
    if last.startswith("MemoryError"):
        return Status.OUT_OF_MEMORY, None
    if any(line.startswith(_REFUSED_PROCESS) for line in stderr.splitlines()):
        return Status.TOO_MANY_PROCESSES, None
    return Status.EXIT_ERROR, None


def last_line(text: str) -> str:
    """The last line of a text that is not empty, as a traceback ends with the exception."""
    return next((line.strip()[:500] for line in reversed(text.splitlines()) if line.strip()), "")
