"""Read the Python stacks of other processes, and find which of them the others wait for.

After :func:`write_stacks_on_signal`, a process writes the stacks of all its threads on a signal from
:func:`read_stacks`, also while it is in C code: the handler of ``faulthandler`` needs neither the interpreter nor its
lock. A process that writes nothing is therefore stopped or hangs in a system call. Imports neither torch nor Ray.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from verl.supervision.processes import STOPPED, life, state_of

SIGNAL = signal.SIGUSR2
# A frame as faulthandler writes it.
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_files: list[TextIO] = []  # kept open for faulthandler until the process ends


def write_stacks_on_signal(folder: str | os.PathLike[str]) -> None:
    """Append the stacks of all threads of this process to a file in ``folder`` whenever ``SIGNAL`` comes."""
    if _files:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = _file_of(folder, os.getpid())
    life.file = file.with_suffix(".life")
    _files.append(file.open("w"))
    faulthandler.register(SIGNAL, file=_files[0], all_threads=True)


def silence_s(folder: str | os.PathLike[str], pids: Sequence[int]) -> float:
    """Return the seconds since one of these processes of this machine last showed life; infinite if none did."""
    files = (_file_of(folder, pid).with_suffix(".life") for pid in pids)
    return time.monotonic() - max((file.stat().st_mtime for file in files if file.exists()), default=-math.inf)


def _file_of(folder: str | os.PathLike[str], pid: int) -> Path:
    return Path(folder) / f"{pid}.txt"


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def is_torch(self) -> bool:
        """True if the frame's file belongs to PyTorch."""
        return "/torch/" in self.file


@dataclass(frozen=True)
class Snapshot:
    """State and stacks of a process at one moment."""

    state: str
    """See :func:`~verl.supervision.processes.state_of`."""
    text: str
    """Stacks of all threads in the format of ``faulthandler``; empty if the process wrote none."""
    is_prepared: bool = True
    """True if the process had called :func:`write_stacks_on_signal`."""

    def threads(self) -> list[list[Frame]]:
        """The frames of each thread, the innermost first."""
        stacks = re.split(r"^(?:Current thread|Thread) .*$", self.text, flags=re.MULTILINE)[1:]
        return [
            [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack)]
            for stack in stacks
        ]

    @property
    def main(self) -> list[Frame]:
        """The frames of the main thread, the innermost first; empty if unknown."""
        return next((frames for frames in reversed(self.threads()) if frames and frames[-1].function == "<module>"), [])

    @property
    def is_in_collective(self) -> bool:
        """True if a thread is in ``torch.distributed``, with only frames of PyTorch inside that call."""
        return any(_enters_collective(frames) for frames in self.threads())

    @property
    def trouble(self) -> str:
        """Why the process cannot run; empty if it can."""
        if not self.state:
            return "its process is gone"
        if self.state in STOPPED:
            return "its process is stopped, by a signal or a debugger"
        if self.text:
            return ""
        if not self.is_prepared:
            return "its process is still starting"
        held = (
            " (the kernel holds it: a disk, a network file system, a driver)"
            if self.state == psutil.STATUS_DISK_SLEEP
            else ""
        )
        return f"its process does not even write its stack{held}"

    @property
    def place(self) -> str:
        """Position of the main thread: the innermost frame and the first frame outside of PyTorch; or the trouble."""
        if self.trouble:
            return self.trouble
        frames = self.main
        if not frames:
            return "in code without a frame of Python"
        caller = next((frame for frame in frames if not frame.is_torch), frames[0])
        return f"in {frames[0]}" + (f", called by {caller}" if caller is not frames[0] else "")


def _enters_collective(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        if "/torch/distributed/" in frame.file:
            return True
        if not frame.is_torch:
            return False
    return False


def read_stacks(folder: str | os.PathLike[str], pids: Sequence[int], timeout_s: float = 5.0) -> dict[int, Snapshot]:
    """Read the stacks of processes of this machine by process id, within ``timeout_s`` for all together.

    Processes that have not called :func:`write_stacks_on_signal` with this folder get no signal, because it would end
    them.
    """
    files = {pid: _file_of(folder, pid) for pid in pids}
    before = {pid: _size(file) for pid, file in files.items()}
    states = {pid: state_of(pid) for pid in pids}
    prepared = {pid for pid, file in files.items() if file.exists()}
    for pid in prepared:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + timeout_s
    sizes: Mapping[int, int] = {}
    while time.monotonic() < deadline:
        sizes, earlier = {pid: _size(file) for pid, file in files.items()}, sizes
        writing = [pid for pid in prepared if states[pid] and states[pid] not in STOPPED]
        if sizes == earlier and all(sizes[pid] > before[pid] for pid in writing):
            break
        time.sleep(0.1)
    written = {pid: file.read_bytes()[before[pid] :] for pid, file in files.items() if file.exists()}
    texts = {pid: data.decode(errors="replace") for pid, data in written.items()}
    return {pid: Snapshot(states[pid], texts.get(pid, ""), pid in prepared) for pid in pids}


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def culprits(snapshots: Mapping[int, Snapshot], waiting: Sequence[int]) -> tuple[list[int], str]:
    """Find the ranks that the others wait for, empty if unknown, and the reason for a message.

    ``snapshots`` are by rank; ``waiting`` are the ranks from which an answer is missing.
    """
    stuck = [rank for rank in snapshots if snapshots[rank].trouble]
    if stuck:
        return stuck, snapshots[stuck[0]].trouble
    inside = [rank for rank in waiting if snapshots[rank].is_in_collective]
    outside = [rank for rank in waiting if rank not in inside]
    if inside and outside:
        return outside, f"not in the collective of {_ranks(inside)}"
    answered = [rank for rank in snapshots if rank not in waiting]
    if inside and answered:
        return answered, f"has answered, and never came to the collective of {_ranks(inside)}"
    if len({snapshots[rank].place for rank in inside}) > 1:
        return [], "the ranks wait in different collectives"
    if inside:
        return [], "all ranks wait in the same collective: look at the network and the devices"
    return [], "no rank waits for another"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
