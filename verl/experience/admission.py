"""Admission of prompts: which may start, and which finished ones a step trains on, so that none is too old.

A group is one prompt with its responses. A version is the number of times that the rollout engines received new
weights; between two versions ``batch_size`` groups are trained on. The age of a group is the version it is trained
on minus the version it started with, so time in queues counts.

Nothing is discarded because of its age. Discarding would remove mostly long responses, which are the slow ones.
Instead, a group starts only if there is a place for it in a step within the bound (arXiv:2505.24298, equation 3).
That alone bounds the age only if groups are trained on in the order in which they started. So that fast groups may
overtake slow ones, a step also waits where otherwise some later step would have to train on more groups than a batch
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from verl.errors import ConfigError


@dataclass(frozen=True)
class Admission:
    """A bound on the age of groups. With the same counts it decides the same: it has no clock and no state.

    With version v, groups may start as long as no more than ``(v + 1) * batch_size + groups_ahead`` have started. A
    group that started with version u may be trained on with versions u to u + max_staleness. So after the step of
    version v at most ``(u + max_staleness - v) * batch_size`` of the groups that started with u or before may be left,
    for every u <= v: as many as the batches up to version u + max_staleness hold. That is always possible: it is true
    for u = v because of the rule for starting, and for earlier u if each step takes the oldest groups.

    Raises:
        ConfigError: ``batch_size < 1``, or more groups ahead than ``max_staleness * batch_size``.
    """

    batch_size: int
    """Groups that are trained on between two versions."""
    groups_ahead: int
    """Groups that may start before the version whose batch they complete."""
    max_staleness: int | None
    """Largest age in versions. None is no bound: a step never waits for a slow group, however often others overtake
    it."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.groups_ahead < 0:
            message = f"batch_size={self.batch_size} must be at least 1, groups_ahead={self.groups_ahead} at least 0."
            raise ConfigError(message)
        if self.max_staleness is not None and self.groups_ahead > self.max_staleness * self.batch_size:
            raise ConfigError(
                f"{self.groups_ahead} groups ahead cannot all be trained on within {self.max_staleness} versions of "
                f"{self.batch_size} groups each: at most {self.max_staleness} * {self.batch_size} = "
                f"{self.max_staleness * self.batch_size} may start ahead. Start fewer ahead, or allow a larger age."
            )

    @classmethod
    def by_versions(cls, batch_size: int, max_staleness: int) -> Admission:
        """Bound the age in versions, and start as many groups as that allows."""
        return cls(batch_size, max_staleness * batch_size, max_staleness)

    @classmethod
    def by_volume(
        cls,
        ppo_mini_batch_size: int,
        require_batches: int,
        trigger_parameter_sync_step: int,
        staleness_threshold: float,
    ) -> Admission:
        """Bound the number of groups as ``async_training.*`` does, which does not bound their age.

        Between two transfers of weights ``volume = trigger_parameter_sync_step * require_batches *
        ppo_mini_batch_size`` groups are trained on, and at most ``(1 + staleness_threshold) * volume`` start, minus
        those left over from before.
        """
        volume = trigger_parameter_sync_step * require_batches * ppo_mini_batch_size
        ahead = int(Fraction(str(staleness_threshold)) * volume)  # as typed: 0.29 * 100 is 28.999... in binary
        return cls(volume, ahead, None)

    def capacity(self, version: int, started: int) -> int:
        """Number of groups that may start now.

        Args:
            version: of the newest weights that engines have.
            started: groups that have started so far, without those that failed or that a filter rejected.
        """
        return max(0, (version + 1) * self.batch_size + self.groups_ahead - started)

    def next_batch(self, version: int, under_way: Mapping[int, int], finished: Sequence[int]) -> list[int] | None:
        """Choose the groups of the next step: the oldest, and of the same age those that finished first.

        Args:
            version: of the newest weights.
            under_way: numbers of unfinished groups by the version with which they started.
            finished: for each finished group that has not been trained on, in the order in which they finished, the
                version with which it started.

        Returns:
            Positions in ``finished``; None if the step must wait for more groups, or for older ones.
        """
        if len(finished) < self.batch_size:
            return None
        order = sorted(range(len(finished)), key=finished.__getitem__)
        # With none under way waiting changes nothing: the bound was lowered, or batches enlarged, by a resumed run.
        if self.max_staleness is not None and any(under_way.values()):
            left = Counter(under_way)
            left.update(finished[position] for position in order[self.batch_size :])
            count = 0
            for start in sorted(left):
                count += left[start]
                if count > (start + self.max_staleness - version) * self.batch_size:
                    return None
        return order[: self.batch_size]
