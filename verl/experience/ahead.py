"""Sampling a fixed number of steps before training: ``trainer.async.lag``.

::

    lag=2         step 1            step 2      step 3      step 4
    samples       batches 1, 2, 3   batch 4     batch 5     batch 6
    after update  0                 1           2           3
    trains on     batch 1           batch 2     batch 3     batch 4

Step s trains on responses of the weights after update max(0, s - 1 - lag), in every run: which responses a step sees
does not depend on how long anything takes, so that a run can be repeated bit by bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from verl.experience.off_policy import with_age
from verl.experience.rewards import RewardRecord
from verl.experience.source import Experience, ExperienceSource
from verl.protocol import DataProto, replace_columns
from verl.utils.deferred import Deferred
from verl.utils.step_context import StepContext

_ABOUT = "about_pending"
"""Entry of ``meta_info`` in the files of a checkpoint."""


@dataclass
class PendingExperience:
    """Responses that a later step trains on."""

    step: int
    """The step that trains on them."""
    updates: int
    """Updates of the policy before they were drawn."""
    experience: Experience
    context: StepContext
    """Has the metrics of sampling until that step takes them."""


class Ahead(ExperienceSource):
    """Samples a batch ``lag`` steps before the step that trains on it, and keeps it until then.

    Args:
        source: samples and scores a batch within one call; it is called for a later step than the one that runs.
        lag: steps between sampling and training.
        last_step: the last step of the run, beyond which nothing is sampled.
    """

    def __init__(self, source: ExperienceSource, lag: int, last_step: int) -> None:
        self._source, self._lag, self._last_step = source, lag, last_step
        self._pending: deque[PendingExperience] = deque()
        self._updates = 0

    def next(self, context: StepContext) -> Experience:
        """See :meth:`ExperienceSource.next`; samples the batch of ``lag`` steps later first."""
        first = self._pending[-1].step + 1 if self._pending else context.number
        for step in range(first, min(context.number + self._lag, self._last_step) + 1):
            self._pending.append(self._sample(step, context))
        pending = self._pending.popleft()
        # What is still to come, the wait for scores, is part of the step that runs now.
        pending.context.seconds, pending.context.spans = context.seconds, context.spans
        pending.context.observe = context.observe
        context.metrics |= pending.context.metrics
        experience = pending.experience
        return replace(experience, batch=with_age(experience.batch, self._updates - pending.updates))

    def updated(self, version: int) -> None:
        """See :meth:`ExperienceSource.updated`."""
        self._updates += 1
        self._source.updated(version)

    def rest(self) -> AbstractContextManager[None]:
        """See :meth:`ExperienceSource.rest`."""
        return self._source.rest()

    def close(self) -> None:
        """See :meth:`ExperienceSource.close`."""
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ExperienceSource.state_dict`; the responses themselves are in :meth:`pending`."""
        return {"updates": self._updates, "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ExperienceSource.load_state_dict`; a run that was started without a lag has no such state."""
        self._updates = state.get("updates", 0)
        self._source.load_state_dict(state.get("source", {}))

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """See :meth:`ExperienceSource.pending`; waiting for it waits for the scores of all pending steps."""
        pending = list(self._pending)
        return Deferred([], lambda: {name: batch for each in pending for name, batch in _to_batches(each).items()})

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """See :meth:`ExperienceSource.load_pending`."""
        steps = sorted({int(name.split("-")[0]) for name in batches})
        self._pending = deque(_from_batches(step, batches) for step in steps)

    def _sample(self, step: int, context: StepContext) -> PendingExperience:
        of_step = replace(context, number=step, metrics={})
        experience = self._source.next(of_step)
        scores = Deferred(experience.scores.futures, functools.cache(experience.scores.then))
        # The workers may be replaced before that step, so nothing of the batch may be left with them.
        held = replace(experience, batch=_copy_to_driver(experience.batch), scores=scores)
        return PendingExperience(step, self._updates, held, of_step)


def _copy_to_driver(batch: DataProto) -> DataProto:
    return DataProto.from_dict(
        tensors=dict(batch.batch.items()), non_tensors=batch.non_tensor_batch, meta_info=batch.meta_info
    )


def _to_batches(pending: PendingExperience) -> dict[str, DataProto]:
    """Convert to batches for files; their ``meta_info`` has what is not a column."""
    experience = pending.experience
    scores = experience.scores.result()
    about = {"updates": pending.updates, "metrics": pending.context.metrics}
    batches = {"batch": experience.batch | DataProto(meta_info={_ABOUT: about})}
    if experience.draws_once:  # the one draw that was scored is the batch with these columns
        [draw] = experience.rewards.draws
        batches["scores"] = scores | DataProto(meta_info={_ABOUT: {"names": draw.names, "rates": draw.rates}})
    else:
        for index, draw in enumerate(experience.rewards.draws):
            about = {"names": draw.names, "rates": draw.rates}
            batches[f"draw-{index}"] = _copy_to_driver(draw.batch) | DataProto(meta_info={_ABOUT: about})
    return {f"{pending.step}-{name}": batch for name, batch in batches.items()}


def _from_batches(step: int, batches: Mapping[str, DataProto]) -> PendingExperience:
    """Invert :func:`_to_batches`."""

    def take(name: str) -> tuple[DataProto, dict[str, Any]]:
        batch = batches[f"{step}-{name}"]
        meta_info = dict(batch.meta_info)
        about = meta_info.pop(_ABOUT)
        return batch.with_meta_info(meta_info), about

    batch, about = take("batch")
    rewards, scores = RewardRecord(), DataProto()
    draws_once = f"{step}-scores" in batches
    if draws_once:
        scores, of_draw = take("scores")
        rewards.add(replace_columns(batch, scores), of_draw["names"], of_draw["rates"])
    else:
        for index in range(sum(name.startswith(f"{step}-draw-") for name in batches)):
            draw, of_draw = take(f"draw-{index}")
            rewards.add(draw, of_draw["names"], of_draw["rates"])
    experience = Experience(batch, Deferred.of(scores), rewards, draws_once)
    return PendingExperience(step, about["updates"], experience, StepContext(step, metrics=about["metrics"]))
