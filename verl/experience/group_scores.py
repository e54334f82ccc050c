"""Scores of the groups of a free-running run, and which of them dynamic sampling drops."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from verl.errors import ConfigError
from verl.experience.background import SerialThread
from verl.experience.dynamic_sampling import judged
from verl.experience.lockstep import Lockstep
from verl.experience.rewards import Scored
from verl.experience.scoring import PartScores, score_columns
from verl.experience.store import GroupScores, PromptGroup
from verl.protocol import DataProto
from verl.workers.rollout.columns import joined_rows

_ABOUT = "about_scores"
"""Entry of ``meta_info`` in the files of a checkpoint."""


class GroupScorer:
    """Scores groups: each in the background as soon as it has its responses, or several together.

    Several together if a judge, a reward model or a function of whole batches scores
    (:meth:`verl.experience.scoring.Scorer.scores_any_time`).

    Args:
        source: scores, and has the configuration.
        join: returns the samples of a group with their prompts.

    Raises:
        ConfigError: groups are filtered, and a subclass of :class:`Lockstep` scores whole batches.
    """

    def __init__(self, source: Lockstep, join: Callable[[PromptGroup], DataProto]) -> None:
        self._source, self._join, self._filters = source, join, source.config.algorithm.filter_groups
        scores_batches = isinstance(source, Lockstep) and type(source).score is not Lockstep.score
        if self._filters.enable and scores_batches:
            raise ConfigError(
                "algorithm.filter_groups.enable=true with a trainer.v1.trainer_mode other than sync scores single "
                f"groups, and {type(source).__name__} replaces Lockstep.score, which scores whole batches. Set "
                "trainer_mode=sync, or leave Lockstep.score as it is."
            )
        self.is_immediate = not scores_batches and source.scorer.scores_any_time(source.reward_fn)
        """True if each group is scored as soon as it has its responses."""
        self._thread = SerialThread("scores of groups")
        self.scores_groups = self.is_immediate or self._filters.enable
        """True if groups are scored, each or some together; else the batch of a step is."""
        self.values: deque[np.ndarray] = deque()
        """The metric of dynamic sampling of the responses of each group that was judged since it was cleared."""

    def follow(self, group: PromptGroup) -> None:
        """Let a group be scored when it has its responses, unless it is scored or groups are scored together."""
        if self.is_immediate and group.scores is None:
            group.scores = Future()
            group.responses.add_done_callback(partial(self._begin, group, group.scores))

    def close(self) -> None:
        """End the thread; groups that are finished later get no scores."""
        self._thread.close()

    def _begin(self, group: PromptGroup, scores: Future[GroupScores], responses: Future[DataProto]) -> None:
        if responses.cancelled() or responses.exception() is not None:  # which is raised of the responses
            scores.cancel()
            return

        def finish(batch: DataProto, part: PartScores) -> None:
            scores.set_result(self.judge(batch, part))

        def start() -> None:
            batch = self._join(group)
            scoring = self._source.scorer.submit_part(batch, self._source.reward_fn, group.index)
            scoring.when_done(lambda: self._run(scores, lambda: finish(batch, scoring.result())))

        self._run(scores, start)

    def _run(self, scores: Future[GroupScores], call: Callable[[], None]) -> None:
        """Call in the thread; an error becomes that of the scores."""

        def fail(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                scores.set_exception(error)

        self._thread.submit(call).add_done_callback(fail)

    def score(self, groups: Sequence[PromptGroup], step: int) -> None:
        """Score groups that have their responses, in one call, and wait."""
        batches = [self._join(group) for group in groups]
        part = self._source.scorer.submit_part(joined_rows(batches), self._source.reward_fn, step).result()
        for group, batch, group_part in zip(groups, batches, part.split(list(map(len, batches))), strict=True):
            group.scores = Future()
            group.scores.set_result(self.judge(batch, group_part))

    def joined(self, groups: Sequence[PromptGroup]) -> Scored:
        """Return the scores of scored groups.

        Raises:
            RewardError: too many of all these samples could not be scored.
        """
        parts = [group.scores.result().part for group in groups if group.scores is not None]
        return self._source.scorer.joined(parts, self._source.reward_fn)

    def judge(self, batch: DataProto, part: PartScores) -> GroupScores:
        """Judge whether a group is informative, if that is asked for.

        Raises:
            RewardError: a sample failed, and ``reward_model.on_failure=stop``; or the metric is not there.
        """
        if not self._filters.enable:
            return GroupScores(part)
        agent = self._source.config.actor_rollout_ref.rollout.agent
        statuses = batch.non_tensor_batch.get("trajectory_status")
        if statuses is not None and all(agent.treatment_of(status) != "train" for status in statuses):
            self.values.append(np.zeros(0))  # nothing was scored, so the metric may be missing
            return GroupScores(part, is_informative=False)
        draw, n = self._source.draw_of(batch, part.scored), self._source.config.actor_rollout_ref.rollout.n
        outcome = judged(draw, str(self._filters.metric), n)
        self.values.append(outcome.values)
        return GroupScores(part, is_informative=bool(outcome.is_kept.any()))


def to_batch(groups: Sequence[PromptGroup]) -> DataProto:
    """Put the scores of those groups that have them into a batch for a file."""
    batches, about = [], []
    for group in groups:
        if group.scores is not None and group.scores.done() and not group.scores.exception():
            part = group.scores.result().part
            batches.append(score_columns(*part.scored))
            about.append([group.index, len(batches[-1]), part.num_samples, part.num_failed, part.failures])
    return joined_rows(batches).with_meta_info({_ABOUT: about}) if batches else DataProto()


def from_batch(batch: DataProto) -> dict[int, PartScores]:
    """Invert :func:`to_batch`: the scores by the index of their group."""
    parts, start = {}, 0
    for index, size, *counts in batch.meta_info.get(_ABOUT, []):
        rows = batch.slice(start, start + size)
        extra = {name: values.tolist() for name, values in rows.non_tensor_batch.items()}
        parts[index] = PartScores((rows.batch["token_level_scores"], extra), *counts)
        start += size
    return parts
