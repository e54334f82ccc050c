"""The processes of a worker group, as Ray's own table of actors knows them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.utils.processes import end_processes

logger = logging.getLogger(__name__)

TITLE = "ray::"
"""What Ray puts at the beginning of a worker's title."""
NODE_TIMEOUT_S = 30.0
"""How long another node may take to answer."""

ENDED_ON_PURPOSE = "killed by `ray.kill`"
"""What Ray says of an actor that was ended on purpose."""
SILENT = "It was killed (kill -9, or the kernel's out-of-memory killer: see dmesg), or ended itself without a word. "
CONSTRUCTOR_RAISED = "its constructor raised"


@dataclass(frozen=True)
class Process:
    """One rank's process, alive or dead.

    A rank whose actor has no process yet has the process number 0.
    """

    rank: int
    name: str
    pid: int
    node_id: str
    address: str
    is_dead: bool
    died_at_ms: float
    how: str
    """How it died, in Ray's words; empty while it lives."""

    @property
    def was_lost(self) -> bool:
        """Whether it died by itself, not because its constructor raised."""
        return self.is_dead and self.how != CONSTRUCTOR_RAISED

    @property
    def place(self) -> str:
        """Name, process number and node, for messages."""
        process = f"pid {self.pid} on node {self.address}" if self.pid else "no process yet"
        return f"{self.name}, {process}" if self.name else process

    @property
    def death(self) -> str:
        """How it died and where to read more, in sentences."""
        words = _last_words(self.log) or (SILENT if "End of file" in self.how else "")
        return f"{self.how.rstrip('. ')}. {words}What it wrote last is in {self.log}."

    @property
    def log(self) -> str:
        """Where Ray keeps what the process wrote to stderr; a pattern if the file is on another node."""
        pattern = f"worker-*-{self.pid}.err"
        folder = logs_folder()
        here = sorted(folder.glob(pattern))
        return str(here[0]) if here else f"{folder / pattern} on node {self.address}"


def _last_words(log: str) -> str:
    """The signal that ended a process, if it could still write about it."""
    file = Path(log)
    tail = file.read_bytes()[-(1 << 16) :].decode(errors="replace") if file.is_file() else ""
    signals = re.findall(r"\*\*\* (SIG[A-Z]+) received", tail)
    if not signals:
        return ""
    hint = " (a write to shared memory found no room: /dev/shm is full, see df)" if signals[0] == "SIGBUS" else ""
    return f"It got the signal {signals[0]}{hint}. "


def logs_folder() -> Path:
    """Where Ray keeps what its processes write, on this node."""
    session: Any = ray_worker._global_node
    return Path(session.get_logs_dir_path())


def processes(workers: Sequence[Any]) -> list[Process]:
    """The process of each rank of a group.

    Args:
        workers: the actors, in the order of ranks.
    """
    return [_process(rank, state.actors(worker._actor_id.hex())) for rank, worker in enumerate(workers)]


def first_to_die(ranks: Sequence[Process]) -> list[Process]:
    """Those that were lost, in the order in which it happened; those that were ended on purpose come last."""
    lost = [process for process in ranks if process.was_lost]
    return sorted(lost, key=lambda process: (ENDED_ON_PURPOSE in process.how, process.died_at_ms, process.rank))


def end(workers: Sequence[Any]) -> None:
    """End actors and wait until their processes are gone and give back what they held, on all nodes that live.

    Takes part of a second; up to some ten if a process is stopped or does not go.
    """
    ranks = processes(workers)
    for worker in workers:
        ray.kill(worker)
    by_node: dict[str, list[int]] = {}
    for process in ranks:
        if process.pid:
            by_node.setdefault(process.node_id, []).append(process.pid)
    stuck = on_nodes(end_processes, {node: (pids, TITLE) for node, pids in by_node.items()})
    for node, pids in stuck.items():
        if pids:
            logger.warning("processes %s on node %s do not end, even when killed: the kernel holds them", pids, node)


def dead_nodes() -> dict[str, str]:
    """The nodes that this Ray has lost: address and cause, by identifier."""
    dead = [node for node in ray.nodes() if not node["Alive"]]
    return {node["NodeID"]: f"{node['NodeManagerAddress']} ({_why_dead(node)})" for node in dead}


def _why_dead(node: Mapping[str, Any]) -> str:
    return brief(str(node.get("DeathReasonMessage") or "")) or "Ray names no cause"


def on_nodes(function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Call a function on several nodes at once; what each returned.

    Args:
        function: of a module that is quick to import.
        arguments: its arguments, by node. Nodes that are dead, or that do not answer in time, are left out.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    asked = {
        node: ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*values)
        for node, values in arguments.items()
        if node != here and node in alive
    }
    answers = {here: function(*arguments[here])} if here in arguments else {}
    answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=NODE_TIMEOUT_S) if asked else ([], [])
    for node, reference in asked.items():
        if reference not in answered:
            continue
        try:
            answers[node] = ray.get(reference)
        except RayError as error:
            logger.warning("node %s did not answer: %s", node, brief(str(error)))
    return answers


def _process(rank: int, row: dict[str, Any]) -> Process:
    # Empty for an actor that was made just now.
    address = row.get("Address", {})
    is_dead = row.get("State") == "DEAD"
    return Process(
        rank=rank,
        name=row.get("Name", ""),
        pid=row.get("Pid", 0),
        node_id=address.get("NodeID", ""),
        address=address.get("IPAddress", ""),
        is_dead=is_dead,
        died_at_ms=row.get("EndTime", 0),
        how=_cause(row["DeathCause"]) if is_dead else "",
    )


def _cause(cause: Any) -> str:
    context = next((field.name for field, _ in cause.ListFields()), None)
    if context == "creation_task_failure_context":
        return CONSTRUCTOR_RAISED
    return brief(getattr(getattr(cause, context), "error_message", "")) if context else "Ray names no cause."


def brief(message: str) -> str:
    """Ray's message without its general advice, and without the lines that say which actor it was."""
    message = re.split(r"Some common causes include|There are some potential root causes", message)[0]
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines).removeprefix("The actor is dead because ").removeprefix("its worker process has died. ")
