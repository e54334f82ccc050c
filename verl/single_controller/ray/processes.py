"""Inspect and end the processes of a worker group, on whichever nodes they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.errors import ProcessLostError
from verl.single_controller.ray.private import (
    CONSTRUCTOR_RAISED,
    TITLE,
    ActorRow,
    actor_row,
    brief,
    is_end_on_purpose,
    is_silent_end,
    logs_folder,
    signal_in_log,
)
from verl.supervision.processes import end_processes

logger = logging.getLogger(__name__)

T = TypeVar("T")

NODE_TIMEOUT_S = 30.0  # for the answer of another node


@dataclass(frozen=True, kw_only=True)
class RankProcess(ActorRow):
    """The process of one rank, alive or dead."""

    rank: int

    @property
    def was_lost(self) -> bool:
        """True if the process died, other than by an error in its constructor."""
        return self.is_dead and self.how != CONSTRUCTOR_RAISED

    @property
    def place(self) -> str:
        """Name, process id and node, for messages."""
        process = f"pid {self.pid} on node {self.address}" if self.pid else "no process yet"
        return f"{self.name}, {process}" if self.name else process

    @property
    def log(self) -> str:
        """Path of the stderr log of the process; a glob pattern if the file is on another node."""
        pattern = f"worker-*-{self.pid}.err"
        folder = logs_folder()
        here = sorted(folder.glob(pattern))
        return str(here[0]) if here else f"{folder / pattern} on node {self.address}"

    @property
    def death(self) -> str:
        """Cause of death and path of the log, as sentences for a message."""
        file, sentences = Path(self.log), [f"{self.how.rstrip('. ')}."]
        signal = signal_in_log(file.read_bytes()[-(1 << 16) :].decode(errors="replace")) if file.is_file() else ""
        if signal:
            full = " (a write to shared memory found no room: /dev/shm is full, see df)" if signal == "SIGBUS" else ""
            sentences.append(f"It got the signal {signal}{full}.")
        elif is_silent_end(self.how):
            sentences.append(
                "It was killed (kill -9, or the kernel's out-of-memory killer: see dmesg), or exited without a message."
            )
        return " ".join([*sentences, f"What it wrote last is in {self.log}."])


def processes_of(workers: Sequence[ActorHandle]) -> list[RankProcess]:
    """Return the process of each rank; ``workers`` are the actors in the order of ranks."""
    return [RankProcess(rank=rank, **vars(actor_row(worker))) for rank, worker in enumerate(workers)]


def lost_ones(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    """Return the lost processes in the order of their deaths, those ended by ``ray.kill`` last."""
    lost = [process for process in ranks if process.was_lost]
    return sorted(lost, key=lambda process: (is_end_on_purpose(process.how), process.died_at_ms, process.rank))


def end_workers(workers: Sequence[ActorHandle]) -> None:
    """End actors and wait until their processes, on all live nodes, are gone and have freed their resources.

    Takes less than a second normally, and about ten if a process is stopped or cannot be killed.
    """
    ranks = processes_of(workers)
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
    """Address and cause of death of each dead node of the cluster, by node id."""
    dead = {}
    for node in ray.nodes():
        if not node["Alive"]:
            cause = brief(str(node.get("DeathReasonMessage") or "")) or "Ray names no cause"
            dead[node["NodeID"]] = f"{node['NodeManagerAddress']} ({cause})"
    return dead


def finished_of(references: Sequence[ObjectRef], timeout_s: float | None, fetch_local: bool = True) -> list[ObjectRef]:
    """Return those references whose results are there within ``timeout_s``, which may be None for no limit.

    Raises:
        ProcessLostError: Ray's process on this node has ended.
    """
    try:
        return (
            ray.wait(list(references), num_returns=len(references), timeout=timeout_s, fetch_local=fetch_local)[0]
            if references
            else []
        )
    except OSError as error:  # of the socket to the raylet; Ray does not convert it
        raise ProcessLostError(f"Ray's process on this node (raylet) has ended: {error}") from error


def on_nodes(function: Callable[..., T], arguments: Mapping[str, Sequence[object]]) -> dict[str, T]:
    """Call a function on several nodes in parallel and return the results by node id.

    Nodes that are dead or do not answer within ``NODE_TIMEOUT_S`` are missing from the result. The module of
    ``function`` should import fast, because a worker process on each node imports it first.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    references = {
        node: ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*values)
        for node, values in arguments.items()
        if node != here and node in alive
    }
    answers = {here: function(*arguments[here])} if here in arguments else {}
    answered = finished_of(list(references.values()), NODE_TIMEOUT_S)
    for node, reference in references.items():
        if reference not in answered:
            continue
        try:
            answers[node] = ray.get(reference)
        except RayError as error:
            logger.warning("node %s did not answer: %s", node, brief(str(error)))
    return answers
