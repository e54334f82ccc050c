"""Watching over the ranks of a group: the first that is lost ends them all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl.errors import ProcessLostError
from verl.single_controller.ray.failures import death_of
from verl.single_controller.ray.processes import first_to_die, processes

logger = logging.getLogger(__name__)


class Watch:
    """Whether a group still has all of its ranks; shared by all views of the same processes.

    Args:
        workers: the actors, in the order of ranks; the group's own list, empty once it is shut down.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.hang_timeout_s: float | None = None
        """Longest that a call may take; None waits for ever."""
        self._workers = workers
        self._loss: str | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether a rank's death ends the other ranks."""
        return self._thread is not None

    def start(self, every_n_seconds: float) -> None:
        """Look every so many seconds, until one is dead."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(every_n_seconds,), name="verl-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()

    def raise_if_lost(self, stage: str) -> None:
        """Raise a ProcessLostError if a rank was lost.

        Args:
            stage: what is asked of the ranks now.
        """
        if self._loss is not None:
            raise ProcessLostError(f"{self._loss}\nFound by {stage}.")

    def end(self, loss: str) -> None:
        """End all ranks, because of one that was lost."""
        with self._ending:
            if self._loss is not None or self._stopped.is_set():
                return
            self._loss = loss
            logger.error("%s\nThe other ranks are ended.", loss)
            for worker in self._workers:
                ray.kill(worker)

    def _run(self, every_n_seconds: float) -> None:
        workers = list(self._workers)
        names = [process.name for process in processes(workers)]
        while not self._stopped.wait(every_n_seconds) and ray.is_initialized():
            try:
                alive = set(ray.util.list_named_actors())
                dead = [] if all(name in alive for name in names) else first_to_die(processes(workers))
            except RayError as error:
                logger.warning("Ray does not say which ranks live: %s", error)
                continue
            if dead:
                self.end(death_of(dead[0], len(workers), "unexpectedly"))
                return
