"""Check what a run needs of this machine: versions, devices, engines, tools, limits."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from verl.base.requirements import install_command, requirements
from verl.utils.available_memory import available_memory

Verdict = Literal["ok", "absent", "warn", "fail"]

OLDEST_PYTHON = (3, 11)
FILES = 65_536
"""Open files that Ray and its workers take on a machine with many cores."""
SHARED_BYTES = 8 * 2**30
"""Shared memory below which Ray's object store spills to disk."""
DISK_BYTES = 20 * 2**30
"""A model of 1.5 billion parameters with its optimizer's state, twice."""
MEMORY_BYTES = 8 * 2**30
SECONDS = 120
"""Time limit of a program that is asked."""
STYLES: dict[str, str] = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red"}

_ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
print(json.dumps({"cuda": torch.version.cuda or torch.version.hip, "gpus": gpus, "nccl": nccl}))
"""


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    name: str
    verdict: Verdict
    """``absent``: not there, and needed by some runs only."""
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Check everything; takes seconds, because PyTorch is imported in another process."""
    return [
        _python(),
        *_packages(),
        *_devices(),
        *(_optional(name, distribution, remedy) for name, distribution, remedy in _ENGINES),
        _program("C compiler", ("cc", "gcc", "clang"), "compiled kernels on CPUs", "apt-get install gcc"),
        _program("bubblewrap", ("bwrap",), "rewards that run generated programs", "apt-get install bubblewrap"),
        *_limits(),
    ]


_ENGINES = (
    ("vLLM", "vllm", f"{install_command('vllm')}, for rollout.name=vllm"),
    ("SGLang", "sglang", f"{install_command('sglang')}, for rollout.name=sglang"),
    ("flash-attn", "flash-attn", "pip install flash-attn, for attn_implementation=flash_attention_2"),
)


def findings_table(findings: list[Finding]) -> Table:
    """Make a table with a line per finding."""
    table = Table("", "verdict", "found", "remedy", box=None)
    for one in findings:
        verdict = Text(one.verdict, style=STYLES[one.verdict])
        table.add_row(Text(one.name, style="bold"), verdict, Text(one.found), Text(one.remedy))
    return table


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", "fail", found, "use Python 3.11 or newer")
    return Finding("Python", "ok", f"{found} ({sys.executable})")


def _packages() -> Iterator[Finding]:
    """Compare the packages that verl requires with those that are installed."""
    for requirement in requirements():
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "fail", "not installed", f"pip install '{requirement}'")
            continue
        is_right = requirement.specifier.contains(Version(version), prereleases=True)
        remedy = "" if is_right else f"pip install '{requirement.name}{requirement.specifier}'"
        yield Finding(requirement.name, "ok" if is_right else "warn", version, remedy)


def _devices() -> Iterator[Finding]:
    driver = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    known = _torch()
    if known is None:
        yield Finding("PyTorch", "fail", "cannot be imported", f"run {sys.executable} -c 'import torch' and read why")
        return
    gpus, cuda = known["gpus"], known["cuda"]
    if gpus:
        yield Finding("GPUs", "ok", f"{len(gpus)} × {gpus[0]}; PyTorch for CUDA {cuda}")
    elif driver:
        remedy = "install the build of PyTorch for this driver" if cuda is None else "look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", "warn", f"the driver sees {driver.splitlines()[0]}, PyTorch sees none", remedy)
    else:
        yield Finding("GPUs", "absent", "none: runs use the CPU")
    if driver:
        yield Finding("GPU driver", "ok", driver.splitlines()[0].rpartition(",")[2].strip())
    if gpus:
        remedy = "" if known["nccl"] else "install a build of PyTorch with NCCL for more than one GPU"
        yield Finding("NCCL", "ok" if known["nccl"] else "warn", known["nccl"] or "not in this PyTorch", remedy)


def _torch() -> dict[str, Any] | None:
    output = _output([sys.executable, "-c", _ASK_TORCH])
    return json.loads(output.splitlines()[-1]) if output else None


def _optional(name: str, distribution: str, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed", remedy)


def _program(name: str, candidates: tuple[str, ...], use: str, remedy: str) -> Finding:
    path = next(filter(None, map(shutil.which, candidates)), None)
    return Finding(name, "ok", path) if path else Finding(name, "absent", f"needed for {use}", remedy)


def _limits() -> Iterator[Finding]:
    yield _enough("memory", available_memory(), MEMORY_BYTES, "end other programs, or use a smaller model")
    yield _enough("disk", psutil.disk_usage(".").free, DISK_BYTES, "free space, or set trainer.default_local_dir")
    if Path("/dev/shm").is_dir():
        remedy = "mount /dev/shm larger (docker run --shm-size=16g)"
        yield _enough("shared memory", psutil.disk_usage("/dev/shm").total, SHARED_BYTES, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES
    can_raise = hard == resource.RLIM_INFINITY or hard >= FILES
    remedy = f"ulimit -n {FILES}" if can_raise else f"raise the hard limit of {hard:,} (limits.conf, docker --ulimit)"
    yield Finding("open files", "ok" if enough else "warn", f"{soft:,}", "" if enough else remedy)


def _enough(name: str, there: int, wanted: int, remedy: str) -> Finding:
    found = f"{there / 2**30:,.1f} GiB"
    if there >= wanted:
        return Finding(name, "ok", found)
    return Finding(name, "warn", f"{found}; runs of usual size want {wanted / 2**30:,.0f} GiB", remedy)


def _output(command: list[str]) -> str:
    """Return what a program prints; empty if it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
