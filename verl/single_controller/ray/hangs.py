"""What a group was doing when it did not answer in time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from verl.errors import ProcessLostError, WorkerError
from verl.single_controller.ray.failures import Asked
from verl.single_controller.ray.processes import Process, logs_folder, on_nodes, processes
from verl.utils.stacks import Snapshot, culprits, read_stacks


def stacks_folder() -> Path:
    """Where each worker of this Ray writes its stacks, on its own node."""
    return logs_folder() / "stacks"


def hang(calls: Mapping[int, Any], asked: Asked, timeout_s: float) -> ProcessLostError:
    """The error for a call that takes too long: who does not answer, where each rank stands, and who is the cause.

    Args:
        calls: reference of the result, by rank.
        asked: whom, and for what.
        timeout_s: how long it may take.
    """
    waiting = _unanswered(calls)
    ranks = processes(asked.workers)
    snapshots = snapshots_of(ranks)
    guilty, why = culprits(snapshots, waiting)
    if guilty:
        first = ranks[guilty[0]]
        lines = [f"rank {first.rank} of {len(ranks)} hangs in {asked.stage} ({first.place}): {why}."]
    else:
        lines = [f"{asked.stage} hangs: {why}."]
    lines += [f"No answer within hang_timeout_s={timeout_s:g} s from {len(waiting)} of {len(calls)} ranks:"]
    lines += _places(ranks, snapshots, waiting)
    others = [rank for rank in snapshots if rank not in waiting]
    lines += ["The others have answered, or were not asked:", *_places(ranks, snapshots, others)] if others else []
    return ProcessLostError("\n".join([*lines, _written(snapshots, asked.stage)]))


def late_start(calls: Mapping[int, Any], asked: Asked, timeout_s: float) -> WorkerError:
    """The error for constructors that take too long; a ProcessLostError if one has begun and does not end.

    Args:
        calls: reference of what tells that a rank has started, by rank.
        asked: the workers.
        timeout_s: how long they may take.
    """
    waiting = _unanswered(calls)
    ranks = processes(asked.workers)
    begun = [rank for rank in waiting if ranks[rank].pid]
    said = f"{len(waiting)} of {len(ranks)} ranks of {asked.title} did not start within {timeout_s:g} s. "
    if not begun:
        return WorkerError(
            f"{said}No process was found for them: other actors hold the processors, or the node of their pool is gone."
        )
    snapshots = snapshots_of(ranks)
    said += "If their constructor takes that long, raise start_timeout_s."
    return ProcessLostError("\n".join([said, *_places(ranks, snapshots, begun), _written(snapshots, asked.stage)]))


def _places(ranks: Sequence[Process], snapshots: Mapping[int, Snapshot], some: Sequence[int]) -> list[str]:
    return [f"  rank {rank} ({ranks[rank].place}): {snapshots[rank].place}" for rank in some]


def snapshots_of(ranks: Sequence[Process]) -> dict[int, Snapshot]:
    """What each rank is doing, by rank; those on other nodes are asked there."""
    by_node: dict[str, list[int]] = {}
    for process in ranks:
        if process.pid and not process.is_dead:
            by_node.setdefault(process.node_id, []).append(process.pid)
    found = on_nodes(read_stacks, {node: (str(stacks_folder()), pids) for node, pids in by_node.items()})
    # Dead, or on a node that does not answer.
    unreachable = Snapshot("", "")
    return {process.rank: found.get(process.node_id, {}).get(process.pid, unreachable) for process in ranks}


def _unanswered(calls: Mapping[int, Any]) -> list[int]:
    references = list(calls.values())
    answered, _ = ray.wait(references, num_returns=len(references), timeout=0)
    return [rank for rank, reference in calls.items() if reference not in answered]


def _written(snapshots: Mapping[int, Snapshot], stage: str) -> str:
    folder = stacks_folder() / f"{stage}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, snapshot in snapshots.items():
        (folder / f"rank_{rank}.txt").write_text(snapshot.text or f"{snapshot.trouble}\n")
    return f"The stacks of all threads of all ranks are in {folder}."
