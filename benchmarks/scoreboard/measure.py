"""Seconds, processor seconds and memory of a program with all its processes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.shape import ROOT
from examples.quickstart.quickstart import QUIET_WAITING, ended_at_exit

SAMPLING_INTERVAL = 0.2


@dataclass(frozen=True)
class Measurement:
    """A finished program."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Of resident memory, summed over its processes: pages that several share count for each of them."""
    steps: list[tuple[float, dict]]
    """Seconds from the start of the program to the end of each batch, and its metrics."""


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and its descendants."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:  # it ended between the two calls
            continue
    return total


def measure(command: Sequence[str], metrics: Path, log: Path) -> Measurement:
    """Run a program that writes lines with ``step``, ``time`` and ``data`` to ``metrics``.

    Raises:
        SystemExit: it failed.
    """
    offline = {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(metrics)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    clock, start, peak = time.time(), time.monotonic(), 0
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | QUIET_WAITING | offline
        )
        with ended_at_exit(process):
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                peak = max(peak, resident_bytes(watched))
                time.sleep(SAMPLING_INTERVAL)
    seconds = time.monotonic() - start
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"{tail}\n\nfailed with exit status {process.returncode}; the whole log: {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [(record["time"] - clock, record["data"]) for record in records if "data" in record]
    return Measurement(seconds, cpu_seconds, peak, steps)
