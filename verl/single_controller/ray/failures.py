"""What went wrong on a worker, in the words of the one who called it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.errors import WorkerError

logger = logging.getLogger(__name__)


def explain(error: RayError, calls: Mapping[int, Any], title: str, method: str, world_size: int) -> str:
    """The message for a call that failed, beginning with the rank that failed first.

    Args:
        error: what ``ray.get`` raised.
        calls: reference of the result, by rank.
        title: class of the workers.
        method: what they were asked to do.
        world_size: number of ranks.
    """
    failures = _failures(calls) or {-1: error}
    order = sorted(failures, key=lambda rank: (_failed_at(failures[rank]), rank))
    lines = [_line(failures[rank], rank, world_size, title, method) for rank in order]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([lines[0], "Failed after it:", *(f"  {line.splitlines()[0]}" for line in lines[1:])])


def _failures(calls: Mapping[int, Any]) -> dict[int, RayError]:
    references = list(calls.values())
    finished, _ = ray.wait(references, num_returns=len(references), timeout=0)
    failures: dict[int, RayError] = {}
    for rank, reference in calls.items():
        if reference not in finished:
            continue
        try:
            ray.get(reference)
        except RayError as error:
            failures[rank] = error
    return failures


def _failed_at(error: RayError) -> float:
    # Set where it was raised. A process that died tells no time, and is more often cause than effect.
    return getattr(getattr(error, "cause", None), "failed_at", 0.0)


def _line(error: RayError, rank: int, world_size: int, title: str, method: str) -> str:
    where = f"{title}.{method} on rank {rank} of {world_size}" if rank >= 0 else f"{title}.{method}"
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{where}: {type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{where}: {str(error).strip().splitlines()[-1]}\n{error}"
    if isinstance(error, RayActorError):
        return f"{where}: the process died. {error}"
    return f"{where}: {type(error).__name__}: {error}"


class Watch:
    """The first death among the actors of a group, found by a thread."""

    def __init__(self) -> None:
        self._death: str | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, workers: Sequence[Any], names: Sequence[str], every_n_seconds: float) -> None:
        """Look every so many seconds, until one is dead."""
        if self._thread is not None:
            return
        run = threading.Thread(target=self._run, args=(list(workers), list(names), every_n_seconds), daemon=True)
        self._thread = run
        run.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()

    def raise_if_dead(self, title: str, method: str) -> None:
        """Raise a WorkerError if a rank has died."""
        if self._death is not None:
            raise WorkerError(f"{title}.{method}: {self._death}")

    def _run(self, workers: list[Any], names: list[str], every_n_seconds: float) -> None:
        while not self._stopped.wait(every_n_seconds) and ray.is_initialized():
            alive = set(ray.util.list_named_actors())
            dead = [rank for rank, name in enumerate(names) if name not in alive]
            if dead and not self._stopped.is_set():
                self._death = f"rank {dead[0]} of {len(names)} ({names[dead[0]]}) died; the other ranks were ended."
                logger.error("%s", self._death)
                for worker in workers:
                    ray.kill(worker)
                return
