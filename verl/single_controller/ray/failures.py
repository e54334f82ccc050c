"""What went wrong on a worker, in the words of the one who called it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskPlacementGroupRemoved,
    WorkerCrashedError,
)

from verl.errors import ProcessLostError, WorkerError
from verl.single_controller.ray.processes import Process, brief, first_to_die, processes

GRACE_S = 0.5
"""How long the other ranks of a failed call may take to fail as well, before the caller is told."""
DEATH_GRACE_S = 15.0
"""How long Ray may take to notice that the other end of a broken connection is dead."""
NODE_GRACE_S = 30.0
"""How long it may take to notice that a node is dead whose workers do not answer."""

LOSSES = (
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    ActorPlacementGroupRemoved,
    TaskPlacementGroupRemoved,
)
"""Errors of Ray that say that a process or what it held is gone; beside them an actor's death."""

# What gloo, NCCL, TCPStore and Ray say when the other end of a connection is gone.
BROKEN_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was aborted|aborted)|broken pipe|socket (closed|timeout)|remote (process|peer)"
    r"|DistBackendError|DistNetworkError|DistStoreError|NCCL error|ncclRemoteError|ncclSystemError|unhandled system"
    r"|gloo[/\w]*\.(cc|h):\d+|recvValue failed|failed to recv|timed out waiting|wait timeout",
    re.IGNORECASE,
)


STORE_IS_FULL = (
    "what is passed between processes found no room: Ray's object store is full, and so is (to 95%) the disk that "
    "takes what does not fit. Free space where Ray keeps its files (/tmp/ray, see df), move them "
    "(+ray_kwargs.ray_init._temp_dir=...), or give the store more memory "
    "(+ray_kwargs.ray_init.object_store_memory=..., in bytes; /dev/shm must have as much)."
)


@dataclass(frozen=True)
class Asked:
    """A call, for messages."""

    title: str
    """Class of the workers."""
    method: str
    workers: Sequence[Any]
    """The actors of the whole group, of which some were asked."""

    @property
    def stage(self) -> str:
        """Class and method."""
        return f"{self.title}.{self.method}"


def explain(error: RayError, calls: Mapping[int, Any], asked: Asked) -> WorkerError:
    """The error for a call that failed, its message beginning with the rank that failed first.

    A broken connection is mostly the consequence of a death which Ray has yet to notice, so it is waited for.

    Args:
        error: what ``ray.get`` raised.
        calls: reference of the result, by rank.
        asked: whom, and for what.

    Returns:
        A ProcessLostError if a process or what it held is gone, else a WorkerError.
    """
    # Those that have failed by now, in their order, then those that fail in consequence.
    failures = _failures(calls, 0)
    failures |= {rank: later for rank, later in _failures(calls, GRACE_S).items() if rank not in failures}
    first = next(iter(failures.values()), error)
    if any(is_loss(failure) for failure in [*failures.values(), error]):
        unreachable = any(isinstance(failure, ActorUnavailableError) for failure in failures.values())
        dead = _deaths(asked.workers, NODE_GRACE_S if unreachable else 0 if _says_so(first) else DEATH_GRACE_S)
        return ProcessLostError(_lost(dead, failures, error, asked))
    if BROKEN_CONNECTION.search(str(first)):
        dead = _deaths(asked.workers, DEATH_GRACE_S)
        if dead:
            return ProcessLostError(_lost(dead, failures, error, asked))
    return WorkerError(_failed(failures, error, asked))


def is_loss(error: BaseException) -> bool:
    """Whether an error says that a process died or that what it held is gone."""
    if isinstance(error, RayTaskError):
        # Raised inside of a worker, e.g. when it asks for what another one held.
        return isinstance(error.cause, (ProcessLostError, *LOSSES)) or _is_death(error.cause)
    return isinstance(error, LOSSES) or _is_death(error)


def _is_death(error: BaseException | None) -> bool:
    return isinstance(error, RayActorError) and not error.actor_init_failed


def _says_so(error: BaseException) -> bool:
    # The death was not noticed by Ray, but by the worker that needed the process.
    return isinstance(error, RayTaskError) and isinstance(error.cause, ProcessLostError)


def _deaths(workers: Sequence[Any], timeout_s: float) -> list[Process]:
    deadline = time.monotonic() + timeout_s
    while True:
        dead = first_to_die(processes(workers))
        if dead or time.monotonic() >= deadline:
            return dead
        time.sleep(0.05)


def death_of(process: Process, ranks: int, stage: str) -> str:
    """The message for a rank that died: which, where, when, how, and where to read more.

    Args:
        process: the rank.
        ranks: how many there are.
        stage: what was being done, e.g. ``"in Actor.update_policy"``.
    """
    return f"rank {process.rank} of {ranks} died {stage} ({process.place}): {process.death}"


def _lost(dead: Sequence[Process], failures: Mapping[int, RayError], error: RayError, asked: Asked) -> str:
    if not dead:
        return _failed(failures, error, asked)
    first, *others = dead
    lines = [death_of(first, len(asked.workers), f"in {asked.stage}")]
    lines += ["Failed after it:"] if others or any(rank != first.rank for rank in failures) else []
    lines += [f"  rank {other.rank} ({other.place}): {other.how}" for other in others]
    gone = {process.rank for process in dead}
    lines += _lines({rank: failure for rank, failure in failures.items() if rank not in gone})
    return "\n".join(lines)


def _failed(failures: Mapping[int, RayError], error: RayError, asked: Asked) -> str:
    if not failures:
        return f"{asked.stage}: {_what(error)}"
    (what, (first, *same)), *_ = _by_failure(failures).items()
    lines = [f"{asked.stage} on rank {first} of {len(asked.workers)}: {what}"]
    lines += [f"The same on {_ranks(same)}."] if same else []
    later = _lines({rank: failure for rank, failure in failures.items() if rank not in (first, *same)})
    return "\n".join([*lines, "Failed after it:", *later] if later else lines)


def _lines(failures: Mapping[int, RayError]) -> list[str]:
    return [f"  {_ranks(ranks)}: {what.splitlines()[0]}" for what, ranks in _by_failure(failures).items()]


def _by_failure(failures: Mapping[int, RayError]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(_what(failure), []).append(rank)
    return ranks


def _failures(calls: Mapping[int, Any], timeout_s: float) -> dict[int, RayError]:
    references = list(calls.values())
    finished, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s) if references else ([], [])
    failures: dict[int, RayError] = {}
    for rank, reference in calls.items():
        if reference not in finished:
            continue
        try:
            ray.get(reference)
        except RayError as error:
            # With its traceback it would hold this frame, and so itself and the results of the other ranks.
            failures[rank] = error.with_traceback(None)
    return dict(sorted(failures.items(), key=lambda item: (_failed_at(item[1]), item[0])))


def _failed_at(error: RayError) -> float:
    # Set where it was raised. A process that died tells no time, and is more often cause than effect.
    return getattr(getattr(error, "cause", None), "failed_at", 0.0)


def _what(error: RayError) -> str:
    full = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(full, OutOfDiskError | ObjectStoreFullError):
        return f"{type(full).__name__}: {STORE_IS_FULL}"
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{str(error).strip().splitlines()[-1]}\n{error}"
    if isinstance(error, RayActorError):
        return f"the process died. {error}"
    return f"{type(error).__name__}: {brief(str(error))}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
