"""The frameworks: how each gets its environment, and the command of a run. To add one, add a row to :data:`PEERS`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scoreboard.run import Run
from benchmarks.scoreboard.verl_command import exported_model, verl_command
from benchmarks.shape import ROOT


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework that runs here."""

    name: str
    packages: tuple[str, ...]
    """What its environment has; none: that of this process."""
    command: Callable[[str, Run, Path], list[str]]
    """Of the environment's Python, the run, and the run's file."""
    model: Callable[[Run], Path]
    """The folder of the trained model."""
    score: str
    """Name of the mean score of a batch in its metrics."""
    loss: str

    def python(self, folder: Path) -> str:
        """Path of the environment's Python; makes the environment in ``folder`` if it is not there."""
        if not self.packages:
            return sys.executable
        python = folder / self.name.lower() / "bin/python"
        if not python.exists():
            print(f"making the environment of {self.name} in {python.parents[1]}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
            install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
            for package in ("torch", *self.packages):
                subprocess.run([*install, package], check=True)
        return str(python)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="verl",
            packages=(),
            command=lambda python, run, file: verl_command(run),
            model=exported_model,
            score="critic/score/mean",
            loss="train/loss",
        ),
        Peer(
            name="TRL",
            packages=("trl>=1.16,<1.17",),
            command=lambda python, run, file: [python, "-m", "benchmarks.scoreboard.trl_program", str(file)],
            model=lambda run: Path(run.output) / "model",
            score="reward",
            loss="loss",
        ),
    )
}


def versions(pythons: dict[str, str]) -> str:
    """Versions of what each environment computes with."""
    program = """
import importlib.metadata as m, sys
names = [n for n in ("torch", "transformers", "trl") if any(m.distributions(name=n))]
print(", ".join(f"{n} {m.version(n)}" for n in names))
"""
    found = {
        name: subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        for name, python in pythons.items()
    }
    return "; ".join(f"{name}: {packages}" for name, packages in found.items())


ABSENT = {
    "verl's own wheel (0.9.1)": "not tried: it is made for GPUs",
    "OpenRLHF (0.11.2)": "requires flash-attn, which is built with CUDA; not tried without",
    "Unsloth (2026.10.9)": "refuses a machine without accelerator by default; not tried otherwise",
    "ms-swift": "its installation did not end in 400 s; not tried again",
    "prime-rl": "not on PyPI",
}
"""Frameworks that are not measured, and why."""
