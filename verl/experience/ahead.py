"""Sampling a fixed number of steps before training: ``trainer.async.lag``.

::

    lag=2         step 1            step 2      step 3      step 4
    samples       batches 1, 2, 3   batch 4     batch 5     batch 6
    after update  0                 1           2           3
    trains on     batch 1           batch 2     batch 3     batch 4

Step s trains on responses of the weights after update max(0, s - 1 - lag), in every run: which responses a step sees
does not depend on how long anything takes, so that a run can be repeated bit by bit.

Rollout engines with a pool of their own sample in a thread while the step trains, and get new weights between two
steps, when they are at rest. The responses are the same as those of engines on the ranks of the policy::

    main thread   | wait, send weights 0 | wait for 1 | train on 1 | wait, send weights 1 | train on 2 | ...
    thread                               | sample 1, sample 2             |               | sample 3   | ...
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import ProcessLostError, RolloutError
from verl.experience.background import CLOSED, RolloutPool
from verl.experience.off_policy import with_age
from verl.experience.rewards import RewardRecord
from verl.experience.source import Experience, ExperienceSource
from verl.protocol import DataProto, replace_columns
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics
from verl.utils.step_context import StepContext

_ABOUT = "about_pending"
"""Entry of ``meta_info`` in the files of a checkpoint."""


WAIT = "wait_prev_gen"
"""Stage in which a step waits for engines of a pool of their own; its time has this public name."""


@dataclass(eq=False)
class PendingExperience:
    """Responses that a later step trains on."""

    step: int
    """The step that trains on them."""
    updates: int
    """Updates of the policy before they were drawn."""
    sampled: Future[Experience]
    context: StepContext
    """Has the metrics of sampling until that step takes them."""

    @property
    def experience(self) -> Experience:
        """Wait for the sampled responses and return them."""
        return self.sampled.result()


class Ahead(ExperienceSource):
    """Samples a batch ``lag`` steps before the step that trains on it, and keeps it until then.

    Args:
        source: samples and scores a batch within one call; it is called for a later step than the one that runs.
        lag: steps between sampling and training; 0 is for rollout engines with a pool alone.
        last_step: the last step of the run, beyond which nothing is sampled.
        pool: rollout engines with a pool of their own, which sample while a step trains; None for engines on the ranks
            of the policy.
    """

    def __init__(self, source: ExperienceSource, lag: int, last_step: int, pool: RolloutPool | None = None) -> None:
        self._source, self._lag, self._last_step, self._pool = source, lag, last_step, pool
        self._pending: deque[PendingExperience] = deque()
        self._under_way: list[PendingExperience] = []
        """Batches whose sampling the main thread has not waited for."""
        self._sent: Metrics = {}
        """Metrics of a transfer of weights between two steps, for the next one."""
        self._updates = 0
        self._is_closed = False

    def next(self, context: StepContext) -> Experience:
        """See :meth:`ExperienceSource.next`; samples the batch of ``lag`` steps later first."""
        first = self._pending[-1].step + 1 if self._pending else context.number
        steps = range(first, min(context.number + self._lag, self._last_step) + 1)
        if self._pool is not None:
            # New weights come between two batches: `with_age` takes all tokens of a batch to be of one version.
            self._wait(context, self._under_way)
            if steps:
                context.metrics |= self._sent | self._pool.update(self._updates)
                self._sent = {}
        for step in steps:
            self._pending.append(self._sample(step, context))
        pending = self._pending.popleft()
        if self._pool is not None:
            self._wait(context, [pending])
        experience = pending.experience
        # Waiting for scores counts toward the current step, not toward the one that sampled ahead.
        pending.context.seconds, pending.context.spans = context.seconds, context.spans
        pending.context.observe, pending.context.is_shown = context.observe, True
        context.metrics |= pending.context.metrics
        if not self._lag:
            return experience
        return replace(experience, batch=with_age(experience.batch, self._updates - pending.updates))

    @property
    def is_sampling(self) -> bool:
        """See :attr:`ExperienceSource.is_sampling`."""
        return any(not pending.sampled.done() for pending in self._under_way)

    def trained(self, context: StepContext) -> None:
        """See :meth:`ExperienceSource.trained`; a thread that takes prompts by itself must not take more meanwhile."""
        if self._pool is not None and not self._pool.takes_prompts_first:
            self._wait(context, self._under_way)

    def updated(self, version: int) -> None:
        """See :meth:`ExperienceSource.updated`."""
        self._updates += 1
        self._source.updated(version)

    @contextmanager
    def rest(self) -> Iterator[None]:
        """See :meth:`ExperienceSource.rest`; engines of a pool have the newest weights then."""
        if self._pool is not None:
            for pending in self._under_way:
                pending.sampled.result()
            self._sent |= self._pool.update(self._updates)
        with self._source.rest():
            yield

    def replace_lost(self, error: ProcessLostError) -> None:
        """See :meth:`ExperienceSource.replace_lost`; a lost batch needs weights that the trainer has no more."""
        is_batch_lost = any(pending.sampled.done() and pending.sampled.exception() for pending in self._pending)
        if self._pool is None or is_batch_lost:
            raise error
        self._pool.replace(error)

    def close(self) -> None:
        """See :meth:`ExperienceSource.close`; does not wait for the thread, which ends with the engines."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.prompts.close()
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ExperienceSource.state_dict`; the responses themselves are in :meth:`pending`."""
        return {"updates": self._updates, "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ExperienceSource.load_state_dict`; a run that was started without a lag has no such state."""
        self._updates = state.get("updates", 0)
        self._source.load_state_dict(state.get("source", {}))

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """See :meth:`ExperienceSource.pending`; waiting for it waits for the responses and scores of all
        pending steps.
        """
        pending = list(self._pending)
        return Deferred(
            [each.sampled for each in pending],
            lambda: {name: batch for each in pending for name, batch in _to_batches(each).items()},
        )

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """See :meth:`ExperienceSource.load_pending`; without a lag there is none, also with a pool."""
        if not self._lag or "prompts" in batches or "waiting" in batches:  # the last two are groups, not whole batches
            super().load_pending(batches)
        steps = sorted({int(name.split("-")[0]) for name in batches})
        self._pending = deque(_from_batches(step, batches) for step in steps)

    def _sample(self, step: int, context: StepContext) -> PendingExperience:
        """Sample the batch of a step, or let the thread of the pool begin to."""
        if self._pool is None:
            sampled: Future[Experience] = Future()
            step_context = replace(context, number=step, metrics={})
            sampled.set_result(self._held(step_context))
            return PendingExperience(step, self._updates, sampled, step_context)
        if self._pool.takes_prompts_first:
            self._pool.prompts.take()
        step_context = replace(
            context, number=step, metrics={}, seconds={}, spans=[], observe=self._check_open, is_shown=False
        )
        sampled = self._pool.thread.submit(functools.partial(self._held, step_context))
        pending = PendingExperience(step, self._updates, sampled, step_context)
        self._under_way.append(pending)
        return pending

    def _held(self, context: StepContext) -> Experience:
        """Sample a batch that outlives the workers, which may be replaced before it is trained on."""
        experience = self._source.next(context)
        if not self._lag:
            return experience
        # A checkpoint may read the scores before the step does, and reading them adds the draw to the reward record.
        scores = Deferred(experience.scores.futures, functools.cache(experience.scores.then))
        return replace(experience, batch=_copy_to_driver(experience.batch), scores=scores)

    def _wait(self, context: StepContext, batches: list[PendingExperience]) -> None:
        """Wait until batches are sampled, and put the times of the sampling into the step that waits."""
        with context.stage(WAIT):
            for pending in batches:
                pending.sampled.result()
        for pending in [pending for pending in batches if pending in self._under_way]:
            self._under_way.remove(pending)
            context.spans += pending.context.spans
            for name, seconds in pending.context.seconds.items():
                context.seconds[name] = context.seconds.get(name, 0.0) + seconds

    def _check_open(self, stage: str) -> AbstractContextManager[object]:
        """End the thread's sampling at its next stage if nothing needs it any more."""
        if self._is_closed:
            raise RolloutError(CLOSED)
        return nullcontext()


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
        scores, score_info = take("scores")
        rewards.add(replace_columns(batch, scores), score_info["names"], score_info["rates"])
    else:
        for index in range(sum(name.startswith(f"{step}-draw-") for name in batches)):
            draw, score_info = take(f"draw-{index}")
            rewards.add(draw, score_info["names"], score_info["rates"])
    experience = Experience(batch, Deferred.from_value(scores), rewards, draws_once)
    sampled: Future[Experience] = Future()
    sampled.set_result(experience)
    return PendingExperience(step, about["updates"], sampled, StepContext(step, metrics=about["metrics"]))
