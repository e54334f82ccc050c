"""Detection of failed, dead and hanging ranks, and the error messages about them.

A call fails            :func:`explain`: which rank failed first and why, and which failed in consequence
A call takes too long   :func:`hang`: which ranks do not answer, where each rank is, and which is the cause
Between two calls       :class:`Watchdog`: ends all ranks after one has died
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
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
from verl.single_controller.ray.private import brief, logs_folder
from verl.single_controller.ray.processes import RankProcess, finished_of, lost_ones, on_nodes, processes_of
from verl.supervision.stacks import Snapshot, culprits, read_stacks, silence_s

logger = logging.getLogger(__name__)

GRACE_S = 0.5  # for the other ranks of a failed call to fail too, so that the message can name the first
DEATH_GRACE_S = 15.0  # for Ray to notice that the process at the other end of a broken connection is dead
NODE_GRACE_S = 30.0  # for Ray to notice that the node of unreachable workers is dead

# Errors of Ray which mean that a process or its data is lost. The death of an actor is handled by `_is_death`.
LOSSES = (
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    ActorPlacementGroupRemoved,
    TaskPlacementGroupRemoved,
)

# Messages of gloo, NCCL, TCPStore and Ray when the other end of a connection is gone.
BROKEN_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was aborted|aborted)|broken pipe|socket (closed|timeout)|remote (process|peer)"
    r"|DistBackendError|DistNetworkError|DistStoreError|NCCL error|ncclRemoteError|ncclSystemError|unhandled system"
    r"|gloo[/\w]*\.(cc|h):\d+|recvValue failed|failed to recv|timed out waiting|wait timeout",
    re.IGNORECASE,
)

COLLECTIVE_TIMEOUT = re.compile(r"timed out waiting|wait timeout|collective operation timeout", re.IGNORECASE)
SLOW_RANK = (
    "a rank waited longer for the others than a collective may take. Where one of them reads a large model or writes a "
    "checkpoint for that long, raise actor_rollout_ref.nccl_timeout (seconds)."
)

STORE_IS_FULL = (
    "what is passed between processes found no room: Ray's object store is full, and so is (to 95%) the disk that "
    "takes what does not fit. Free space where Ray keeps its files (/tmp/ray, see df), move them "
    "(ray.init(_temp_dir=...), RAY_TMPDIR), or give the store more memory "
    "(ray.init(object_store_memory=...), in bytes; /dev/shm must have as much). A run gives ray.init its "
    "ray_kwargs.ray_init."
)


@dataclass(frozen=True)
class GroupCall:
    """A call of a worker group, as error messages describe it."""

    title: str
    """Class name of the workers."""
    method: str
    workers: Sequence[ActorHandle]
    """All actors of the group, including those that were not called."""

    @property
    def stage(self) -> str:
        """Class and method, e.g. ``"Actor.update_policy"``."""
        return f"{self.title}.{self.method}"


# ---- a call fails ---------------------------------------------------------------------------------


def explain(error: RayError, outputs: Mapping[int, ObjectRef], call: GroupCall) -> WorkerError:
    """Build the error for a failed call: a ProcessLostError if a process or its data is lost, else a WorkerError.

    Its message begins with the rank that failed first. ``outputs`` are the output references by rank.
    """
    # The ranks that have failed by now in order of time, then those that fail in consequence.
    failures = _failures(outputs, 0)
    failures |= {rank: later for rank, later in _failures(outputs, GRACE_S).items() if rank not in failures}
    first = next(iter(failures.values()), error)
    if any(is_loss(failure) for failure in [*failures.values(), error]):
        unreachable = any(isinstance(failure, ActorUnavailableError) for failure in failures.values())
        # If a worker itself reports the loss of another process, none of this group has to be dead: no need to wait.
        is_second_hand = isinstance(first, RayTaskError) and isinstance(first.cause, ProcessLostError)
        dead = _deaths(call.workers, NODE_GRACE_S if unreachable else 0 if is_second_hand else DEATH_GRACE_S)
        return ProcessLostError(_loss_message(dead, failures, error, call))
    # A broken connection mostly follows from a death that Ray has not noticed yet, so wait for that.
    if BROKEN_CONNECTION.search(str(first)) and (dead := _deaths(call.workers, DEATH_GRACE_S)):
        return ProcessLostError(_loss_message(dead, failures, error, call))
    return WorkerError(_failure_message(failures, error, call))


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that a process died or its data is lost."""
    if isinstance(error, RayTaskError):
        # Raised inside a worker, e.g. when it fetches an object of a dead one.
        return isinstance(error.cause, (ProcessLostError, *LOSSES)) or _is_death(error.cause)
    return isinstance(error, LOSSES) or _is_death(error)


def _is_death(error: BaseException | None) -> bool:
    return isinstance(error, RayActorError) and not error.actor_init_failed


def _deaths(workers: Sequence[ActorHandle], timeout_s: float) -> list[RankProcess]:
    deadline = time.monotonic() + timeout_s
    while True:
        dead = lost_ones(processes_of(workers))
        if dead or time.monotonic() >= deadline:
            return dead
        time.sleep(0.05)


def _failures(outputs: Mapping[int, ObjectRef], timeout_s: float) -> dict[int, RayError]:
    """Errors of the ranks that fail within ``timeout_s``, in order of time."""
    finished = finished_of(list(outputs.values()), timeout_s)
    failures: dict[int, RayError] = {}
    for rank, reference in outputs.items():
        if reference not in finished:
            continue
        try:
            ray.get(reference)
        except RayError as error:
            # Its traceback would refer to this frame, and so keep the results of the other ranks in memory.
            failures[rank] = error.with_traceback(None)
    # `failed_at` is set where the error was raised. A dead process has none and sorts first, as the likely cause.
    failed_at = {rank: getattr(getattr(e, "cause", None), "failed_at", 0.0) for rank, e in failures.items()}
    return dict(sorted(failures.items(), key=lambda item: (failed_at[item[0]], item[0])))


def death_message(process: RankProcess, ranks: int, stage: str) -> str:
    """Message for a rank that died; ``stage`` is what was being done, e.g. ``"in Actor.update_policy"``."""
    return f"rank {process.rank} of {ranks} died {stage} ({process.place}): {process.death}"


def _loss_message(
    dead: Sequence[RankProcess], failures: Mapping[int, RayError], error: RayError, call: GroupCall
) -> str:
    if not dead:
        return _failure_message(failures, error, call)
    first, *later = dead
    lines = [death_message(first, len(call.workers), f"in {call.stage}")]
    lines += ["Failed after it:"] if later or any(rank != first.rank for rank in failures) else []
    lines += [f"  rank {other.rank} ({other.place}): {other.how}" for other in later]
    gone = {process.rank for process in dead}
    lines += _lines({rank: failure for rank, failure in failures.items() if rank not in gone})
    return "\n".join(lines)


def _failure_message(failures: Mapping[int, RayError], error: RayError, call: GroupCall) -> str:
    if not failures:
        return f"{call.stage}: {_description(error)}"
    (what, (first, *same)), *_ = _by_failure(failures).items()
    lines = [f"{call.stage} on rank {first} of {len(call.workers)}: {what}"]
    lines += [f"The same on {_ranks(same)}."] if same else []
    later = _lines({rank: failure for rank, failure in failures.items() if rank not in (first, *same)})
    return "\n".join([*lines, "Failed after it:", *later] if later else lines)


def _lines(failures: Mapping[int, RayError]) -> list[str]:
    return [f"  {_ranks(ranks)}: {what.splitlines()[0]}" for what, ranks in _by_failure(failures).items()]


def _by_failure(failures: Mapping[int, RayError]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(_description(failure), []).append(rank)
    return ranks


def _description(error: RayError) -> str:
    full = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(full, OutOfDiskError | ObjectStoreFullError):
        return f"{type(full).__name__}: {STORE_IS_FULL}"
    if isinstance(error, RayTaskError):
        text = f"{type(error.cause).__name__}: {error.cause}"
        return f"{text}\n{SLOW_RANK}" if COLLECTIVE_TIMEOUT.search(text) else text
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{str(error).strip().splitlines()[-1]}\n{error}"
    if isinstance(error, RayActorError):
        return f"the process died. {error}"
    return f"{type(error).__name__}: {brief(str(error))}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ---- a call takes too long ------------------------------------------------------------------------


def stacks_folder() -> Path:
    """Folder in which each worker writes its stacks, on its own node."""
    return logs_folder() / "stacks"


def hang(outputs: Mapping[int, ObjectRef], call: GroupCall, timeout_s: float) -> ProcessLostError:
    """Build the error for a call that takes too long: the ranks that do not answer, where each rank is, and the cause.

    Writes the stacks of all ranks to files. ``outputs`` are the output references by rank.
    """
    waiting = _unanswered(outputs)
    ranks = processes_of(call.workers)
    snapshots = _snapshots(ranks)
    guilty, why = culprits(snapshots, waiting)
    if guilty:
        first = ranks[guilty[0]]
        lines = [f"rank {first.rank} of {len(ranks)} hangs in {call.stage} ({first.place}): {why}."]
    else:
        lines = [f"{call.stage} hangs: {why}."]
    limit = f"trainer.recovery.hang_timeout_s={timeout_s:g} s (raise it if the work takes that long)"
    lines += [f"No answer, and no sign of work, within {limit} from {len(waiting)} of {len(outputs)} ranks:"]
    lines += _places(ranks, snapshots, waiting)
    idle = [rank for rank in snapshots if rank not in waiting]
    lines += ["The others have answered, or were not asked:", *_places(ranks, snapshots, idle)] if idle else []
    return ProcessLostError("\n".join([*lines, _written(snapshots, call.stage)]))


def late_start(started: Mapping[int, ObjectRef], call: GroupCall, timeout_s: float) -> WorkerError:
    """Build the error for constructors that take too long: a ProcessLostError if a late rank has a process.

    ``started`` holds for each rank a reference that resolves when its constructor has returned.
    """
    waiting = _unanswered(started)
    ranks = processes_of(call.workers)
    late_ranks = [rank for rank in waiting if ranks[rank].pid]
    text = f"{len(waiting)} of {len(ranks)} ranks of {call.title} did not start within {timeout_s:g} s. "
    if not late_ranks:
        return WorkerError(
            f"{text}No process was found for them: other actors hold the processors, or the node of their pool is gone."
        )
    snapshots = _snapshots(ranks)
    text += "If their constructor takes that long, raise trainer.ray_wait_register_center_timeout (seconds)."
    return ProcessLostError("\n".join([text, *_places(ranks, snapshots, late_ranks), _written(snapshots, call.stage)]))


def _unanswered(outputs: Mapping[int, ObjectRef]) -> list[int]:
    answered = finished_of(list(outputs.values()), 0)
    return [rank for rank, reference in outputs.items() if reference not in answered]


def _snapshots(ranks: Sequence[RankProcess]) -> dict[int, Snapshot]:
    """Read the stacks of each rank on its node, by rank."""
    stacks = on_nodes(read_stacks, _processes_by_node(ranks))
    unreachable = Snapshot("", "")  # the process is dead, or its node does not answer
    return {process.rank: stacks.get(process.node_id, {}).get(process.pid, unreachable) for process in ranks}


def _processes_by_node(ranks: Sequence[RankProcess]) -> dict[str, tuple[str, list[int]]]:
    """Return the folder of stacks and the ids of the living processes of each node."""
    by_node: dict[str, tuple[str, list[int]]] = {}
    for process in ranks:
        if process.pid and not process.is_dead:
            by_node.setdefault(process.node_id, (str(stacks_folder()), []))[1].append(process.pid)
    return by_node


def group_silence_s(workers: Sequence[ActorHandle]) -> float:
    """Return the seconds since one of the ranks last made progress in a call; infinite if none ever did.

    While one works, the others may have to wait for it, so they may be silent.
    """
    return min(on_nodes(silence_s, _processes_by_node(processes_of(workers))).values(), default=math.inf)


def _places(ranks: Sequence[RankProcess], snapshots: Mapping[int, Snapshot], some: Sequence[int]) -> list[str]:
    return [f"  rank {rank} ({ranks[rank].place}): {snapshots[rank].place}" for rank in some]


def _written(snapshots: Mapping[int, Snapshot], stage: str) -> str:
    folder = stacks_folder() / f"{stage}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, snapshot in snapshots.items():
        (folder / f"rank_{rank}.txt").write_text(snapshot.text or f"{snapshot.trouble}\n")
    return f"The stacks of all threads of all ranks are in {folder}."


class WaitingCalls:
    """Begin of the time limit of each call that a thread waits for; shared by all groups over the same processes.

    A rank computes one call after the other, so the time for which a call waits for an earlier one, which another
    thread waits for, does not count.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begins: dict[tuple[int, int], float] = {}
        """By the number of the call and the thread that waits."""
        self._changing = threading.Lock()

    def new_number(self) -> int:
        """Number a call; earlier ones have smaller numbers."""
        return next(self._numbers)

    @contextmanager
    def waiting(self, call_number: int) -> Iterator[None]:
        """Wait for a call within the context."""
        call = call_number, threading.get_ident()
        with self._changing:
            self._begins[call] = time.monotonic()
        try:
            yield
        finally:
            with self._changing:
                del self._begins[call]
                self._begins |= {other: time.monotonic() for other in self._begins if other[0] > call_number}

    def left_s(self, call_number: int, limit_s: float) -> float:
        """Seconds that the call for which this thread waits has left, of ``limit_s``; all while it is not its turn."""
        with self._changing:
            if any(other < call_number for other, _ in self._begins):
                return limit_s
            return self._begins[call_number, threading.get_ident()] + limit_s - time.monotonic()


# ---- between two calls ----------------------------------------------------------------------------


class Watchdog:
    """Ends all ranks of a group when one is lost; shared by all groups over the same processes.

    Args:
        workers: the actors in the order of ranks. This is the group's own list, which a shutdown empties.
    """

    def __init__(self, workers: Sequence[ActorHandle]) -> None:
        self.hang_timeout_s: float | None = None
        """Longest duration of a call; None for no limit."""
        self._workers = workers
        self._loss: str | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()

    @property
    def is_on(self) -> bool:
        """True if the watchdog was started, so that a rank's death ends the others."""
        return self._thread is not None

    @property
    def is_lost(self) -> bool:
        """True if a rank was lost, and all were ended."""
        return self._loss is not None

    def start(self, every_n_seconds: float) -> None:
        """Start a thread that checks the ranks every so many seconds until one is dead; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(every_n_seconds,), name="verl-watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the checks."""
        self._stopped.set()

    def raise_if_lost(self, stage: str) -> None:
        """Raise a ProcessLostError if a rank was lost; ``stage`` names the current call in the message."""
        if self._loss is not None:
            raise ProcessLostError(f"{self._loss}\nFound by {stage}.")

    def end(self, loss: str) -> None:
        """End all ranks, for the given reason, unless that was done or the watchdog was stopped."""
        with self._ending:
            if self._loss is not None or self._stopped.is_set():
                return
            self._loss = loss
            logger.error("%s\nThe other ranks are ended.", loss)
            for worker in self._workers:
                ray.kill(worker)

    def _run(self, every_n_seconds: float) -> None:
        workers = list(self._workers)
        names = [process.name for process in processes_of(workers)]
        while not self._stopped.wait(every_n_seconds) and ray.is_initialized():
            try:
                alive = set(ray.util.list_named_actors())
                dead = [] if all(name in alive for name in names) else lost_ones(processes_of(workers))
            except RayError as error:
                logger.warning("Ray does not say which ranks live: %s", error)
                continue
            if dead:
                self.end(death_message(dead[0], len(workers), "unexpectedly"))
                return
