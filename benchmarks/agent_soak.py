"""Memory, files, threads and cached keys over many trajectories with tools, through a whole run. ::

    python -m benchmarks.agent_soak [--trajectories 2000] [--controller local]

A tiny random policy trains by GRPO. Each trajectory calls tools in two turns (a function, an MCP server); in one of
twenty a call goes wrong (``verl.testing.scripted_agent.BAD_CALLS``): it raises, hangs, floods its output, ends its
process, and so on. After each step every process of the run is measured; the table gives the medians of each quarter.
At the end nothing of it may be left.

The driver's memory rises less and less for the first hundreds of trajectories: oneDNN keeps what it compiled for each
number of rows that a prefill had. With ``ONEDNN_PRIMITIVE_CACHE_CAPACITY=16`` in the environment it keeps 16 of them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import psutil

from verl.agents.router import Router
from verl.protocol import DataProto
from verl.testing import scripted_agent
from verl.testing.scripted_agent import BAD_CALLS, good_script
from verl.testing.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import PPOStepContext, RayPPOTrainer
from verl.workers.rollout.native.prefixes import PrefixCache

PROMPTS, RESPONSES = 25, 4
"""Of a step."""
BAD_SHARE = 20
"""One of so many prompts has a bad call."""
TITLES = {"ray::WorkerHost": "rank", "ray::WorkerActor": "agent worker", "ray::RouterActor": "router"}
Measures = dict[str, dict[str, float]]
"""By process, and by what was measured."""


def entries(_: Any = None) -> dict[str, float]:
    """Count what this process remembers of trajectories: pages of the prefix tree, and the router's conversations."""
    living = gc.get_objects()
    return {
        "prefix pages": float(sum(len(one) for one in living if isinstance(one, PrefixCache))),
        "conversations": float(sum(len(one._asked) for one in living if isinstance(one, Router))),
    }


def of_process(process: psutil.Process) -> dict[str, float]:
    """Measure a process from outside."""
    with process.oneshot():
        memory = process.memory_info().rss / 2**20
        return {"MiB": memory, "files": float(process.num_fds()), "threads": float(process.num_threads())}


class SoakTrainer(RayPPOTrainer):
    """Measures all processes after each step."""

    found: ClassVar[list[Measures]] = []
    trajectories: ClassVar[list[int]] = []

    def step(self, prompts: DataProto, context: PPOStepContext) -> DataProto:
        """See :meth:`RayPPOTrainer.step`."""
        batch = super().step(prompts, context)
        self.found.append(self._measured())
        self.trajectories.append(len(batch))
        return batch

    def _measured(self) -> Measures:
        found: Measures = {"driver": of_process(psutil.Process()) | entries()}
        counts: dict[str, int] = defaultdict(int)
        for child in psutil.Process().children(recursive=True):
            title = " ".join(child.cmdline())[:200]
            name = next((said for start, said in TITLES.items() if title.startswith(start)), "")
            if name:
                found[f"{name} {counts[name]}"] = of_process(child)
                counts[name] += 1
        found["all children"] = {"number": float(len(psutil.Process().children(recursive=True)))}
        if self.typed_config.trainer.controller == "ray":
            import ray

            asked = [worker.__ray_call__.remote(entries) for worker in self.actor_rollout_wg.workers]
            for rank, remembered in enumerate(ray.get(asked, timeout=60)):
                found[f"engine {rank}"] = remembered
        return found


class SoakRunner(TaskRunner):
    """A run with that trainer."""

    def trainer_class(self) -> type[RayPPOTrainer]:
        """See :class:`TaskRunner`."""
        return SoakTrainer


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts with scripts; one of ``BAD_SHARE`` meets a bad call, every kind by turns."""
    made, bad = countdown_rows(count), itertools.cycle(BAD_CALLS.values())
    for number, row in enumerate(made):
        script = good_script(number)
        if number % BAD_SHARE == BAD_SHARE - 1:
            script[1] = [next(bad)]
        row["script"] = json.dumps(script)
    return made


def soak(folder: Path, trajectories: int, controller: str) -> list[Measures]:
    """Run so many trajectories; the measures of each step."""
    steps = max(8, -(-trajectories // (PROMPTS * RESPONSES)))
    paths = make_tiny_run(folder) | {"train": write_jsonl(folder / "soak.jsonl", rows(PROMPTS * steps))}
    changes = scripted_agent.settings(folder) | {
        "trainer__controller": controller,
        "trainer__n_gpus_per_node": 2 if controller == "ray" else 1,
        "trainer__total_training_steps": steps,
        "data__train_batch_size": PROMPTS - PROMPTS % 2 if controller == "ray" else PROMPTS,
        "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS - PROMPTS % 2 if controller == "ray" else PROMPTS,
        "actor_rollout_ref__rollout__n": RESPONSES,
        "actor_rollout_ref__rollout__agent__num_workers": 2,
        "ray_kwargs__ray_init__num_cpus": 2,
    }
    run_ppo(compose(overrides(paths, folder, **changes)), SoakRunner)
    return SoakTrainer.found


def table(found: list[Measures]) -> str:
    """Median of each measure in each quarter of the steps."""
    lines = ["| process | measure | 1st quarter | 2nd | 3rd | 4th |", "|---|---|---|---|---|---|"]
    quarter = len(found) / 4
    parts = [found[round(part * quarter) : round((part + 1) * quarter)] for part in range(4)]
    for process, measures in found[-1].items():
        for name in measures:
            medians = [[one[process][name] for one in part if name in one.get(process, {})] for part in parts]
            shown = [f"{statistics.median(values):.0f}" if values else "" for values in medians]
            lines.append(f"| {process} | {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def left(known: set[int], patience_s: float = 30.0) -> list[str]:
    """What the run has left in this process and below it, after at most ``patience_s`` seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        gc.collect()  # reward processes end with the object that holds them
        names = ("trajectory ", "tool", "agent loops", "to_thread", "requests")
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
        found = threads + [" ".join(child.cmdline())[:80] for child in children]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--controller", choices=("local", "ray"), default="local")
    arguments = parser.parse_args()
    began, known = time.monotonic(), {child.pid for child in psutil.Process().children(recursive=True)}
    with tempfile.TemporaryDirectory(prefix="agent_soak_") as folder:
        os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/metrics.jsonl"
        found = soak(Path(folder), arguments.trajectories, arguments.controller)
    said = f"{sum(SoakTrainer.trajectories)} trajectories in {len(found)} steps, {time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{said}\n\n{table(found)}\n")
    if remains := left(known):
        raise SystemExit(f"left after the run: {remains}")
    sys.stdout.write("left after the run: no thread and no process\n")


if __name__ == "__main__":
    main()
