"""Memory, files, sockets, threads and cached keys over many trajectories of agents, through a whole run. ::

    python -m benchmarks.agent_soak [--trajectories 2000] [--controller local]

A tiny random policy trains by GRPO. Three of four prompts call tools in two turns (a function, an MCP server); the
fourth is answered by a program, which asks the endpoint over HTTP. One prompt of twenty has a bad call
(``tests.support.scripted_agent.BAD_CALLS``): it raises, hangs, floods its output, ends its process, and so on; and one
has a bad program (``tests.support.scripted_programs``): it never ends, asks too late, uses another's key. After each
step every process of the run is measured; the table gives the medians of each quarter. At the end nothing of it may be
left.

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
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.support import scripted_agent
from tests.support.scripted_agent import BAD_CALLS, good_script
from tests.support.scripted_programs import PROGRAMS
from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from verl.protocol import DataProto
from verl.serving.router import Router
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOStepContext, PPOTrainer
from verl.workers.rollout.native.prefixes import PrefixCache

PROMPTS, RESPONSES = 25, 4
"""Of a step."""
PROGRAM_SHARE, BAD_SHARE = 4, 20
"""One of so many prompts is answered by a program; has a bad call, and has a bad program."""
TRAJECTORY_TIMEOUT_S = 10
TITLES = {"ray::WorkerHost": "rank", "ray::WorkerActor": "agent worker", "ray::AgentRouter": "router"}
Measures = dict[str, dict[str, float]]
"""By process, and by what was measured."""


def entries(_: Any = None) -> dict[str, float]:
    """Count what this process remembers of trajectories: pages of the prefix tree, and the router's conversations."""
    living = gc.get_objects()
    return {
        "prefix pages": float(sum(len(one) for one in living if isinstance(one, PrefixCache))),
        "conversations": float(sum(len(one._pending) for one in living if isinstance(one, Router))),
    }


def of_process(process: psutil.Process) -> dict[str, float]:
    """Measure a process from outside."""
    with process.oneshot():
        memory = process.memory_info().rss / 2**20
        return {
            "MiB": memory,
            "files": float(process.num_fds()),
            "sockets": float(len(process.net_connections("tcp"))),
            "threads": float(process.num_threads()),
        }


def kind_of(command: list[str]) -> str:
    """Name what a process runs: the title that Ray gave it, its Python file, or its program."""
    if command and command[0].startswith("ray::"):
        return command[0].split(".")[0]
    files = [Path(part).name for part in command if part.endswith(".py")]
    return files[0] if files else Path(command[0]).name if command else "ended"


class SoakTrainer(PPOTrainer):
    """Measures all processes after each step."""

    found: ClassVar[list[Measures]] = []
    trajectories: ClassVar[list[int]] = []

    def step(self, context: PPOStepContext) -> DataProto:
        """See :meth:`PPOTrainer.step`."""
        batch = super().step(context)
        self.found.append(self._measured())
        self.trajectories.append(len(batch))
        return batch

    def _measured(self) -> Measures:
        found: Measures = {"driver": of_process(psutil.Process()) | entries()}
        kinds: Counter[str] = Counter()
        for child in psutil.Process().children(recursive=True):
            try:
                kind = kind_of(child.cmdline())
            except psutil.NoSuchProcess:  # it ended in between
                continue
            if kind in TITLES:
                found[f"{TITLES[kind]} {kinds[kind]}"] = of_process(child)
            kinds[kind] += 1
        found["children"] = {"all": float(kinds.total())} | {kind: float(number) for kind, number in kinds.items()}
        if self.typed_config.trainer.controller == "ray":
            import ray

            asked = [worker.__ray_call__.remote(entries) for worker in self.policy_workers.workers]
            for rank, remembered in enumerate(ray.get(asked, timeout=60)):
                found[f"engine {rank}"] = remembered
        return found


class SoakRunner(TaskRunner):
    """A run with that trainer."""

    def trainer_class(self) -> type[PPOTrainer]:
        """See :class:`TaskRunner`."""
        return SoakTrainer


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts with scripts, of tools and of programs; bad calls and bad programs of every kind by turns."""
    made, bad_calls = countdown_rows(count), itertools.cycle(BAD_CALLS.values())
    bad_programs = itertools.cycle(name for name in PROGRAMS if name not in ("good", "blocks"))
    for number, row in enumerate(made):
        place, script, row["agent_name"] = number % BAD_SHARE, good_script(number), "scripted"
        if number % PROGRAM_SHARE == 1:
            deed = next(bad_programs) if place == PROGRAM_SHARE + 1 else "good"
            script, row["agent_name"] = [deed, TRAJECTORY_TIMEOUT_S], "program"
        elif place == BAD_SHARE - 1:
            script[1] = [next(bad_calls)]
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
        "actor_rollout_ref__rollout__agent__trajectory_timeout_s": TRAJECTORY_TIMEOUT_S,
        "ray_kwargs__ray_init__num_cpus": 2,
    }
    run_ppo(compose(overrides(paths, folder, **changes)), SoakRunner)
    return SoakTrainer.found


def table(found: list[Measures]) -> str:
    """Median of each measure in each quarter of the steps."""
    lines = ["| process | measure | 1st quarter | 2nd | 3rd | 4th |", "|---|---|---|---|---|---|"]
    quarter = len(found) / 4
    parts = [found[round(part * quarter) : round((part + 1) * quarter)] for part in range(4)]
    for process in found[-1]:
        for name in dict.fromkeys(name for one in found for name in one.get(process, {})):
            medians = [[one[process].get(name, 0.0) for one in part if process in one] for part in parts]
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
