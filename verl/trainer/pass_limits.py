"""What the run knows of the passes that fit the memory of its ranks; it outlives the workers that found it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl.errors import PassTooLargeError

METRIC = "recovery/micro_batch_splits"


class PassLimits:
    """Limits that ended workers have found, for those that are started after them.

    Args:
        may_cut: ``trainer.recovery.split_on_out_of_memory``.
    """

    def __init__(self, may_cut: bool) -> None:
        self.may_cut = may_cut
        self.limits: dict[str, int] = {}
        self._cuts = 0
        self._of_workers: dict[str, float] = {}

    def learn(self, error: BaseException) -> None:
        """Take the limit from a loss, if that is what it was."""
        found = _cause(error)
        if found is not None:
            self.limits[found.kind] = min(found.limit, self.limits.get(found.kind, found.limit))
            self._cuts += 1
            self._cuts += int(sum(self._of_workers.values()))
            self._of_workers = {}

    def tell(self, groups: Iterable[Any]) -> None:
        """Give workers that were just started what is known; nothing if they know it without."""
        if self.limits or not self.may_cut:
            for group in groups:
                group.limit_passes(self.may_cut, self.limits)

    def see(self, update: str, metrics: dict[str, float]) -> None:
        """Take what an update says of its worker out of ``metrics``: several workers say it under one name."""
        if METRIC in metrics:
            self._of_workers[update] = metrics.pop(METRIC)

    def metrics(self) -> dict[str, float]:
        """``recovery/micro_batch_splits``: how often passes were made smaller, once they were."""
        cuts = self._cuts + sum(self._of_workers.values())
        return {METRIC: cuts} if cuts else {}


def _cause(error: BaseException | None) -> PassTooLargeError | None:
    """The error of the rank, among the causes of the one that the driver got."""
    while error is not None:
        if isinstance(error, PassTooLargeError):
            return error
        inside = getattr(error, "cause", None)  # of Ray's own error, the one that was raised in the worker
        if isinstance(inside, PassTooLargeError):
            return inside
        error = error.__cause__
    return None
