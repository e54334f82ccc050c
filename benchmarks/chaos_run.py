"""One run of ``main_ppo`` in which something breaks at a given stage; started by chaos.py. ::

    CHAOS_PLAN=PLAN.json python -m benchmarks.chaos_run <overrides of verl.trainer.main_ppo>

All processes of the run have that variable. The plan says what breaks, in which step and stage, and how many seconds
into it; null breaks nothing. It happens once, whatever is started again: a file beside the plan says that it did, and
where the run was at that moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.chaos_agents import ORDER
from verl.trainer.config import PPOConfig
from verl.trainer.config.command_line import command
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOStepContext, PPOTrainer

PLAN = "CHAOS_PLAN"


def ranks() -> list[psutil.Process]:
    """The processes of the ranks, in the order in which they were started."""
    found = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::WorkerHost")]
    return sorted(found, key=lambda process: process.create_time())


def agent_processes(title: str) -> list[psutil.Process]:
    """The processes of agent loops (``WorkerActor``), or their router (``AgentRouter``)."""
    return [p for p in psutil.Process().children(recursive=True) if f"ray::{title}" in " ".join(p.cmdline())]


def reward_processes() -> list[psutil.Process]:
    """Processes that score responses."""
    return [p for p in psutil.Process().children(recursive=True) if "killable_pool" in " ".join(p.cmdline())]


def processes_of_ray(name: str) -> list[psutil.Process]:
    """The raylet, or the server of Ray's global state."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() == name]


def mcp_servers() -> list[psutil.Process]:
    """The servers of tools that processes of agent loops have started."""
    return [p for p in psutil.Process().children(recursive=True) if p.cmdline()[-1:] and "server.py" in p.cmdline()[-1]]


def send(number: signal.Signals, found: list[psutil.Process], which: int = 0) -> str:
    """Signal one of the processes, or say that there is none."""
    if not found:
        return "nothing to kill"
    found[which % len(found)].send_signal(number)
    return f"{number.name} to {found[which % len(found)].name()}"


def damage_newest_checkpoint(folder: Path) -> str:
    """Flip a byte in the middle of a weights file of the newest step; "nothing to damage" before the first."""
    files = sorted(folder.glob("global_step_*/actor/model_*.pt"), key=lambda path: path.stat().st_mtime)
    if not files:
        return "nothing to damage"
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 0xFF
    files[-1].write_bytes(data)
    return f"a byte of {files[-1].parent.parent.name} flipped"


class Fault:
    """What the plan says, once.

    Args:
        plan: path of the plan.
        checkpoints: folder of the run's checkpoints.
    """

    def __init__(self, plan: Path, checkpoints: Path) -> None:
        self.plan = json.loads(plan.read_text())
        self.done = plan.with_name("fault.json")
        self.checkpoints = checkpoints
        self.step, self.stage = 0, ""

    def enter(self, step: int, stage: str) -> None:
        """The run enters a stage."""
        self.step, self.stage = step, stage
        if self.plan and (step, stage) == (self.plan["step"], self.plan["stage"]) and not self.done.exists():
            self.done.write_text("{}")
            threading.Timer(self.plan["after_s"], self.strike).start()

    def strike(self) -> None:
        """Break it; note what was broken, and in which stage that was."""
        steps = sorted(int(path.name.rpartition("_")[2]) for path in self.checkpoints.glob("global_step_*[0-9]"))
        whole = steps[:-1] if "damaged" in self.plan["fault"] else steps
        note = {"stage": self.stage, "finished": self.step - 1, "saved": whole[-1] if whole else 0}
        self.done.write_text(json.dumps(note))
        kind, which = self.plan["fault"], self.plan["which"]
        said = self.faults()[kind](which)
        self.done.write_text(json.dumps(note | {"did": said}))

    def order(self, number: signal.Signals) -> str:
        """Let the next call of a tool signal its own process."""
        new = self.done.with_name("order.new")
        new.write_text(str(int(number)))
        new.rename(self.done.with_name(ORDER))
        return f"{number.name} ordered"

    def faults(self) -> dict[str, Callable[[int], str]]:
        """What can be broken, by name; each takes the number of the process."""
        driver = psutil.Process()
        return {
            "rank killed": lambda which: send(signal.SIGKILL, ranks(), which),
            "rank frozen": lambda which: send(signal.SIGSTOP, ranks(), which),
            "agent process killed": lambda which: send(signal.SIGKILL, agent_processes("WorkerActor"), which),
            "agent process frozen": lambda which: send(signal.SIGSTOP, agent_processes("WorkerActor"), which),
            "agent router killed": lambda _: send(signal.SIGKILL, agent_processes("AgentRouter")),
            "agent router frozen": lambda _: send(signal.SIGSTOP, agent_processes("AgentRouter")),
            "rank of agents killed": lambda which: send(signal.SIGKILL, ranks(), which),
            "rank of agents frozen": lambda which: send(signal.SIGSTOP, ranks(), which),
            "tool ends its process": lambda _: self.order(signal.SIGKILL),
            "tool stops its process": lambda _: self.order(signal.SIGSTOP),
            "MCP server killed": lambda which: send(signal.SIGKILL, mcp_servers(), which),
            "reward process killed": lambda which: send(signal.SIGKILL, reward_processes(), which),
            "raylet killed": lambda _: send(signal.SIGKILL, processes_of_ray("raylet")),
            "Ray's state server killed": lambda _: send(signal.SIGKILL, processes_of_ray("gcs_server")),
            "raylet frozen": lambda _: send(signal.SIGSTOP, processes_of_ray("raylet")),
            "Ray's state server frozen": lambda _: send(signal.SIGSTOP, processes_of_ray("gcs_server")),
            "driver killed": lambda _: send(signal.SIGKILL, [driver]),
            "checkpoint damaged, driver killed": lambda _: (
                damage_newest_checkpoint(self.checkpoints) + ", " + send(signal.SIGKILL, [driver])
            ),
            "SIGTERM": lambda _: send(signal.SIGTERM, [driver]),
        }


class WatchedContext(PPOStepContext):
    """Tells the fault which stage begins."""

    fault: ClassVar[Fault]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See :class:`verl.utils.step_context.StepContext`."""
        self.fault.enter(self.number, name)
        with super().stage(name):
            yield


class ChaosTrainer(PPOTrainer):
    """A trainer to whom something happens."""

    context_class = WatchedContext


class ChaosRunner(TaskRunner):
    """A run with that trainer."""

    def trainer_class(self) -> type[PPOTrainer]:
        """See :class:`TaskRunner`."""
        return ChaosTrainer


def run(config: PPOConfig) -> Any:
    """The run, with the fault of the plan."""
    WatchedContext.fault = Fault(Path(os.environ[PLAN]), Path(config.trainer.default_local_dir))
    run_ppo(config, ChaosRunner)


def main() -> None:
    """The command line, which is for Hydra."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="settings of verl.trainer.main_ppo")
    parser.parse_args()
    command(run, config_name="ppo_trainer", root=PPOConfig, restarts=True)()


if __name__ == "__main__":
    main()
