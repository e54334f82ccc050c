"""Check what a run needs of this machine: versions, devices, engines, tools, limits."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from verl.base.requirements import install_command, requirements
from verl.utils.available_memory import available_memory

Verdict = Literal["ok", "absent", "warn", "fail"]

OLDEST_PYTHON = (3, 11)  # as requires-python in pyproject.toml
FILES = 65_536
"""Open files that Ray and its workers take on a machine with many cores."""
PROCESSES = 8_192
"""Processes and threads of one user: Ray, PyTorch and OpenMP start hundreds of threads in each process."""
SHARED_SHARE = 0.4
"""Part of the memory that /dev/shm should have (Linux gives it 0.5, containers 64 MB): Ray's store takes 0.3 of the
memory if it finds as much there, else batches go to disk; new weights on their way to engines need room beside it."""
DISK_BYTES = 20 * 2**30
"""A model of 1.5 billion parameters with its optimizer's state, twice."""
MEMORY_BYTES = 8 * 2**30
SECONDS = 120
"""Time limit of a program that is asked."""
STYLES: dict[str, str] = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red"}

_OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Branch of NVIDIA's driver that each CUDA needs (CUDA release notes, table of minor version compatibility)."""

_ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
capability = torch.cuda.get_device_capability() if gpus else None
about = {"cuda": torch.version.cuda or torch.version.hip, "gpus": gpus, "nccl": nccl, "capability": capability}
print(json.dumps(about))
"""
_COMPILE_FOR_GPU = """
import torch
f = torch.compile(lambda x: (2 * x).relu().sum())
assert f(torch.arange(-3.0, 4.0, device="cuda")).item() == 12.0
"""
# Finds them in their cache, if they were compiled before.
_COMPILE_FOR_CPU = """
import sys
from verl.backends.cpu.kernels import cpu_kernels
sys.exit(cpu_kernels() is None)
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

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
        _bubblewrap(),
        *_limits(),
    ]


_ENGINES = (
    ("vLLM", "vllm", f"{install_command('vllm')}, for rollout.name=vllm"),
    ("SGLang", "sglang", f"{install_command('sglang')}, for rollout.name=sglang"),
)


def findings_table(findings: list[Finding]) -> Table:
    """Make a table with a line per finding."""
    table = Table("", "verdict", "found", "remedy", box=None)
    for finding in findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(Text(finding.name, style="bold"), verdict, Text(finding.found), Text(finding.remedy))
    return table


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", "fail", version, "use Python 3.11 or newer")
    return Finding("Python", "ok", f"{version} ({sys.executable})")


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
    output = _output([sys.executable, "-c", _ASK_TORCH])
    if not output:
        yield Finding("PyTorch", "fail", "cannot be imported", f"run {sys.executable} -c 'import torch' and read why")
        return
    build = json.loads(output.splitlines()[-1])
    gpus, cuda = build["gpus"], build["cuda"]
    if gpus:
        yield Finding("GPUs", "ok", f"{len(gpus)} × {gpus[0]}; PyTorch for CUDA {cuda}")
    elif driver:
        first = driver.splitlines()[0]
        remedy = unseen_gpu_remedy(cuda, first.rpartition(",")[2].strip())
        yield Finding("GPUs", "warn", f"the driver sees {first}, PyTorch sees none", remedy)
    else:
        yield Finding("GPUs", "absent", "none: runs use the CPU")
        yield _ran("CPU kernels", _COMPILE_FOR_CPU, "compiled", "apt-get install gcc: without them a CPU is slower")
    if driver:
        yield Finding("GPU driver", "ok", driver.splitlines()[0].rpartition(",")[2].strip())
    if gpus:
        remedy = "" if build["nccl"] else "install a build of PyTorch with NCCL for more than one GPU"
        yield Finding("NCCL", "ok" if build["nccl"] else "warn", build["nccl"] or "not in this PyTorch", remedy)
        yield _ran("GPU compiler", _COMPILE_FOR_GPU, "a function compiled and ran", "apt-get install g++ python3-dev")
    yield _flash_attention(build["capability"])


def unseen_gpu_remedy(cuda: str | None, driver: str) -> str:
    """Say why PyTorch, built for ``cuda`` (None: for CPUs), sees no GPU of a machine with this driver version."""
    if cuda is None:
        return "install the build of PyTorch for this driver"
    oldest = _OLDEST_DRIVERS.get(cuda.split(".")[0])
    if oldest and driver.split(".")[0].isdecimal() and int(driver.split(".")[0]) < oldest:
        return f"PyTorch for CUDA {cuda} needs driver R{oldest} or newer: update the driver, or install an older build"
    return "look at CUDA_VISIBLE_DEVICES"


def _flash_attention(capability: list[int] | None) -> Finding:
    """Import flash-attn, whose binaries fit one build of PyTorch, and compare the GPU with what it supports."""
    name, use = "flash-attn", "for attn_implementation=flash_attention_2"
    finding = _optional(name, name, f"pip install flash-attn, {use}")
    if finding.verdict != "ok":
        return finding
    if capability is None:
        return Finding(name, "absent", f"{finding.found}; of no use without a GPU")
    if capability < [8, 0]:  # FlashAttention supports Ampere GPUs and newer ones
        remedy = f"a GPU of compute capability 8.0 (Ampere) or newer, {use}"
        return Finding(name, "warn", f"{finding.found}; this GPU has {'.'.join(map(str, capability))}", remedy)
    return _ran(name, "import flash_attn", finding.found, "build it again for this PyTorch: pip install --no-cache-dir")


def _ran(name: str, program: str, version: str, remedy: str) -> Finding:
    """Run a Python program in a process of its own; if it fails, its error or first line is the finding."""
    with tempfile.TemporaryDirectory() as cache:  # so that torch.compile does compile
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-c", program]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return Finding(name, "warn", f"no end after {SECONDS} s", remedy)
    if done.returncode == 0:
        return Finding(name, "ok", version)
    error_lines = done.stderr.strip().splitlines()
    errors = [line for line in error_lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return Finding(name, "warn", [f"ended with code {done.returncode}", *error_lines[:1], *errors][-1], remedy)


def _optional(name: str, distribution: str, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed", remedy)


def _bubblewrap() -> Finding:
    if path := shutil.which("bwrap"):
        return Finding("bubblewrap", "ok", path)
    use = "needed for rewards that run generated programs"
    return Finding("bubblewrap", "absent", use, "apt-get install bubblewrap")


def _this_folder() -> Finding:
    """Check that runs can write to the working directory: their settings and checkpoints are below it by default."""
    try:
        with tempfile.TemporaryFile(dir="."):
            return Finding("this folder", "ok", "can be written")
    except OSError as error:
        remedy = "start runs elsewhere, or set hydra.run.dir and trainer.default_local_dir"
        return Finding("this folder", "warn", f"cannot be written: {error.strerror}", remedy)


def _limits() -> Iterator[Finding]:
    yield _enough("memory", available_memory(), MEMORY_BYTES, "end other programs, or use a smaller model")
    yield _enough("disk", psutil.disk_usage(".").free, DISK_BYTES, "free space, or set trainer.default_local_dir")
    yield _this_folder()
    if Path("/dev/shm").is_dir():
        yield _shared_memory(psutil.disk_usage("/dev/shm").total, psutil.virtual_memory().total)
    yield _limit("open files", resource.RLIMIT_NOFILE, FILES, f"ulimit -n {FILES}")
    yield _limit("processes", resource.RLIMIT_NPROC, PROCESSES, f"ulimit -u {PROCESSES}")
    if Path("/dev/infiniband").is_dir():
        yield _limit("locked memory", resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY, "ulimit -l unlimited")


def _shared_memory(total: int, memory: int) -> Finding:
    """Compare /dev/shm with the memory of the machine: Ray's store, which has the batches, and weights share it."""
    share = int(SHARED_SHARE * memory)
    return _enough("shared memory", total, share, f"mount /dev/shm larger (docker run --shm-size={share >> 30}g)")


def _limit(name: str, kind: int, needed: int, command: str) -> Finding:
    """Compare a limit of this process with what is wanted; the process may raise it up to the hard limit."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
    least = math.inf if needed == resource.RLIM_INFINITY else needed
    text = "no limit" if soft == math.inf else f"{soft:,}"
    if soft >= least:
        return Finding(name, "ok", text)
    remedy = command if hard >= least else f"raise the hard limit of {hard:,} (limits.conf, docker --ulimit)"
    return Finding(name, "warn", text, remedy)


def _enough(name: str, available: int, needed: int, remedy: str) -> Finding:
    text = f"{available / 2**30:,.1f} GiB"
    if available >= needed:
        return Finding(name, "ok", text)
    return Finding(name, "warn", f"{text}; runs of usual size want {needed / 2**30:,.0f} GiB", remedy)


def _output(command: list[str]) -> str:
    """Return what a program prints; empty if it is not installed, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
