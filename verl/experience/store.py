"""Prompt groups that were started and that no step has trained on yet, and the choice of those that a step takes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verl.experience.admission import Admission
from verl.experience.scoring import PartScores
from verl.protocol import DataProto


@dataclass(frozen=True)
class GroupScores:
    """Scores of a group."""

    part: PartScores
    is_informative: bool = True
    """False if dynamic sampling drops the group."""


@dataclass(eq=False)
class PromptGroup:
    """The samples of one prompt, under way or finished."""

    index: int
    """Its place in the order in which prompts were started, from 0."""
    prompts: DataProto
    """A row for each sample, named, without ``meta_info``."""
    version: int
    """Updates of the policy before the weights that the engines had when it started; its age counts from them."""
    responses: Future[DataProto] = field(default_factory=Future)
    """A row for each sequence, without the columns of the prompts."""
    scores: Future[GroupScores] | None = None
    """Scores of :attr:`responses`; None until scoring begins, or where the batch of a step is scored at once."""
    started_at: float = field(default_factory=time.monotonic)
    finished_at: float | None = None

    _is_held: bool = False

    def hold(self) -> None:
        """Copy the responses of a finished group to this process, because those that have them may end before a step.

        Does nothing if they are here.
        """
        if not self._is_held:
            copied: Future[DataProto] = Future()
            copied.set_result(copy_to_driver(self.responses.result()))
            self.responses, self._is_held = copied, True

    @property
    def has_responses(self) -> bool:
        """Return whether all of its samples are there, with scores or without."""
        return self.responses.done() and not self.responses.cancelled() and self.responses.exception() is None

    @property
    def is_finished(self) -> bool:
        """Return whether all of its samples are there, and the scores that a step waits for."""
        return self.finished_at is not None

    @property
    def is_informative(self) -> bool:
        """False if it is finished and dynamic sampling drops it."""
        return not self.is_finished or self.scores is None or self.scores.result().is_informative


class GroupStore:
    """Groups that were started and not trained on yet; its methods may be called by any thread.

    Args:
        admission: which of the finished groups a step takes, with versions counted in updates of the policy.
        drop_after: largest age of a group, beyond which :meth:`drop_late` drops it; None drops none.
        wait_at: age of an unfinished group at which a step waits for it; None is no such age.
    """

    def __init__(self, admission: Admission, drop_after: int | None = None, wait_at: int | None = None) -> None:
        self._admission, self._drop_after, self._wait_at = admission, drop_after, wait_at
        self._groups: dict[int, PromptGroup] = {}
        self._finished_order: list[int] = []
        self.changed = threading.Condition()
        """Notified when a group is finished or has failed."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: PromptGroup) -> None:
        """Keep a group until a step takes it; it is finished when it has its scores, if these are under way."""
        with self.changed:
            self._groups[group.index] = group
        last: Future[Any] = group.responses if group.scores is None else group.scores
        last.add_done_callback(lambda done: self._note_end(group, done))

    def _note_end(self, group: PromptGroup, done: Future[Any]) -> None:
        with self.changed:
            # One that was dropped, or begun anew, may end before it is cancelled.
            if self._groups.get(group.index) is group and not done.cancelled() and done.exception() is None:
                group.finished_at = time.monotonic()
                self._finished_order.append(group.index)
            self.changed.notify_all()

    def groups(self) -> list[PromptGroup]:
        """Return all groups, in the order in which they were started."""
        with self.changed:
            return [self._groups[index] for index in sorted(self._groups)]

    def raise_failure(self) -> None:
        """Raise the error of a group that has failed, if there is one."""
        for group in self.groups():
            for part in (group.responses, group.scores):
                if part is not None and part.done() and not part.cancelled():
                    part.result()

    def choice(self, updates: int) -> list[PromptGroup] | None:
        """Return the groups that the next step trains on, in the order of their start; None if it must wait.

        Those that :meth:`drop_uninformative` has yet to drop are not among them.

        Args:
            updates: updates of the policy so far.
        """
        with self.changed:
            finished = [group for index in self._finished_order if (group := self._groups[index]).is_informative]
            running = Counter(group.version for group in self._groups.values() if not group.is_finished)
            if self._wait_at is not None and any(updates - version >= self._wait_at for version in running):
                return None
            positions = self._admission.next_batch(updates, running, [group.version for group in finished])
            if positions is None:
                return None
            return sorted((finished[position] for position in positions), key=lambda group: group.index)

    def take(self, groups: Iterable[PromptGroup]) -> None:
        """Forget groups, because a step trains on them."""
        with self.changed:
            for group in groups:
                del self._groups[group.index]
            self._finished_order = [index for index in self._finished_order if index in self._groups]

    def drop_uninformative(self) -> list[PromptGroup]:
        """Forget and return the finished groups that dynamic sampling drops."""
        dropped = [group for group in self.groups() if not group.is_informative]
        self.take(dropped)
        return dropped

    def drop_late(self, updates: int) -> list[PromptGroup]:
        """Forget and return the groups that have become too old, if such are dropped."""
        limit = self._drop_after
        late = [group for group in self.groups() if limit is not None and updates - group.version > limit]
        self.take(late)
        return late


def copy_to_driver(batch: DataProto) -> DataProto:
    """Return the batch with all columns in this process."""
    return DataProto.from_dict(
        tensors=dict(batch.batch.items()), non_tensors=batch.non_tensor_batch, meta_info=batch.meta_info
    )
