"""How long a run takes to its first step and to its end, against the import of its libraries in a bare interpreter.

    python -m benchmarks.startup [--rounds 3]

A run of two steps of ``main_ppo`` with a tiny model, in the driver's process and on two ranks of Ray, so that next to
nothing but the start and the end is measured. The runs and the bare import take turns. ``silence`` is the longest time
without a line of output. A ratio of 1 is not possible on Ray: the libraries are loaded in the driver and in the ranks,
one after the other. Commands that only answer are timed to their first line, and by what their processes computed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shape import ROOT
from tests.support.tiny_run import make_tiny_run, overrides

IMPORTS = "import torch, tensordict, transformers; from transformers import AutoModelForCausalLM"
FIRST_STEP = b"step 1/2"
KINDS = {
    "local": {"trainer.controller": "local"},
    "ray, 2 ranks": {"trainer.controller": "ray", "trainer.n_gpus_per_node": 2},
}

COMMANDS = ("--help", "explain data.train_batch_size", "train --cfg job")


@dataclass(frozen=True)
class Times:
    """Seconds of one run."""

    first_step: float
    end: float
    silence: float


def timed_run(command: list[str], folder: Path) -> Times:
    """Run a command to its end, and note when its lines come."""
    began = time.monotonic()
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, env=variables) as run:
        assert run.stdout is not None
        output, first_step, silence, before = b"", 0.0, 0.0, began
        while part := os.read(run.stdout.fileno(), 65536):
            now = time.monotonic()
            output, silence, before = output + part, max(silence, now - before), now
            if not first_step and FIRST_STEP in output:
                first_step = now - began
    if run.returncode or not first_step:
        raise SystemExit(f"the run failed with code {run.returncode}:\n{output.decode(errors='replace')}")
    return Times(first_step, time.monotonic() - began, silence)


def timed_command(words: str) -> tuple[float, float]:
    """Run `verl` with some words; return the seconds to its first output and the processor seconds of all of it."""
    before, began = os.times(), time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "verl", *words.split()], stdout=subprocess.PIPE, cwd=ROOT) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        first = time.monotonic() - began
        run.stdout.read()
    if run.returncode:
        raise SystemExit(f"verl {words} failed with code {run.returncode}")
    after = os.times()
    return first, sum(after[2:4]) - sum(before[2:4])


def timed_import() -> float:
    """Seconds in which a bare interpreter imports the libraries and ends."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - began


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each of the three is run")
    rounds = parser.parse_args().rounds
    runs: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    imports: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = make_tiny_run(folder)
        steps = {"trainer.total_training_steps": 2, "trainer.logger": "[console]"}
        for _ in range(rounds):
            imports.append(timed_import())
            for kind, changes in KINDS.items():
                settings = overrides(paths, folder, **steps, **changes)
                runs[kind].append(timed_run([sys.executable, "-m", "verl.trainer.main_ppo", *settings], folder))
    print(f"import of the libraries: {min(imports):.1f} s at least, {statistics.median(imports):.1f} s median\n")
    print(
        "| run | to the first step | of imports | first step to end | of imports | silence |\n|---|---|---|---|---|---|"
    )
    for kind, found in runs.items():
        start, end = min(run.first_step for run in found), min(run.end - run.first_step for run in found)
        silence, unit = min(run.silence for run in found), min(imports)
        print(f"| {kind} | {start:.1f} s | {start / unit:.2f} | {end:.1f} s | {end / unit:.2f} | {silence:.1f} s |")
    print("\n| command | to the first output | processor time |\n|---|---|---|")
    for words in COMMANDS:
        first, processor = map(min, zip(*(timed_command(words) for _ in range(rounds)), strict=True))
        print(f"| verl {words} | {first:.2f} s | {processor:.2f} s |")


if __name__ == "__main__":
    main()
