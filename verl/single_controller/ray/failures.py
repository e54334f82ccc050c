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


GRACE_S = 0.5
"""How long the other ranks of a failed call may take to fail as well, before the caller is told."""


def explain(error: RayError, calls: Mapping[int, Any], title: str, method: str, world_size: int) -> str:
    """The message for a call that failed, beginning with the rank that failed first.

    Args:
        error: what ``ray.get`` raised.
        calls: reference of the result, by rank.
        title: class of the workers.
        method: what they were asked to do.
        world_size: number of ranks.
    """
    # Those that have failed by now, in their order, then those that fail in consequence.
    failures = _failures(calls, 0)
    failures |= {rank: later for rank, later in _failures(calls, GRACE_S).items() if rank not in failures}
    if not failures:
        return f"{title}.{method}: {_what(error)}"
    ranks_by_failure: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks_by_failure.setdefault(_what(failure), []).append(rank)
    (what, (first, *same)), *later = ranks_by_failure.items()
    lines = [f"{title}.{method} on rank {first} of {world_size}: {what}"]
    lines += [f"The same on {_ranks(same)}."] if same else []
    lines += ["Failed after it:"] if later else []
    return "\n".join(lines + [f"  {_ranks(ranks)}: {what.splitlines()[0]}" for what, ranks in later])


def _failures(calls: Mapping[int, Any], timeout_s: float) -> dict[int, RayError]:
    references = list(calls.values())
    finished, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
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
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{str(error).strip().splitlines()[-1]}\n{error}"
    if isinstance(error, RayActorError):
        return f"the process died. {error}"
    return f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
