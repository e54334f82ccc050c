"""Sampling and training in turns: a step samples with the weights of the step before, scores, and then trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from verl.algorithms import adv_needs
from verl.config import PPOConfig
from verl.experience.dynamic_sampling import Draw, fill_batch
from verl.experience.off_policy import with_age
from verl.experience.prompts import name_groups, repeat_prompts
from verl.experience.records import RecordFolder, generation_records
from verl.experience.response_source import ResponseSource
from verl.experience.rewards import RewardRecord, Scored
from verl.experience.scoring import Scorer, leave_out_failed, score_columns
from verl.experience.sequences import Trajectories, trajectory_scores, with_prompts
from verl.experience.source import Experience, ExperienceSource
from verl.protocol import DataProto, replace_columns
from verl.utils.deferred import Deferred
from verl.utils.step_context import StepContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Lockstep(ExperienceSource):
    """Samples and scores within the step that trains on it, so that nothing is in flight between two steps.

    A subclass may replace :meth:`rollout` or :meth:`score`; ``RayPPOTrainer.experience_class`` names it.

    Args:
        config: the whole configuration.
        tokenizer: of the policy, for the texts of samples.
        next_prompts: takes the next batch of prompts from the data.
        responses: answers prompts.
        scorer: scores responses.
        reward_fn: the reward manager of training.
        samples: where scored responses are written for people to read.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        next_prompts: Callable[[], DataProto],
        responses: ResponseSource,
        scorer: Scorer,
        reward_fn: object,
        samples: RecordFolder,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.next_prompts = next_prompts
        self.responses = responses
        self.scorer = scorer
        self.reward_fn = reward_fn
        self.samples = samples
        columns = adv_needs(config.algorithm.adv_estimator).columns
        self._n = config.actor_rollout_ref.rollout.n
        self._compares_siblings = "index" in columns and self._n > 1
        self._needs_greedy_baseline = "reward_baselines" in columns

    def next(self, context: StepContext) -> Experience:
        """See :meth:`ExperienceSource.next`; dynamic sampling takes further prompts until the batch is full."""
        rewards, filters = RewardRecord(), self.config.algorithm.filter_groups
        if not filters.enable:
            batch = self.rollout(self.next_prompts(), context)
            return Experience(self._with_age(batch), self.score(batch, context, rewards), rewards)
        draws = self._draws(context, rewards)
        batch, metrics = fill_batch(draws, filters, self.config.data.train_batch_size, self._n)
        context.metrics |= metrics
        return Experience(self._with_age(batch), Deferred.from_value(DataProto()), rewards, draws_once=False)

    def _with_age(self, batch: DataProto) -> DataProto:
        """Add the age of the tokens, 0, if the correction reads it."""
        return with_age(batch, 0) if self.config.algorithm.rollout_correction.interpolates else batch

    def updated(self, version: int) -> None:
        """See :meth:`ExperienceSource.updated`; engines take the newest weights whenever they generate."""

    def state_dict(self) -> dict[str, object]:
        """See :meth:`ExperienceSource.state_dict`; between two steps nothing is in flight."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See :meth:`ExperienceSource.load_state_dict`."""

    def _draws(self, context: StepContext, rewards: RewardRecord) -> Iterator[Draw]:
        """Yield scored responses to the next prompts of the data, without end."""
        first_row = 0
        while True:
            prompts = self.next_prompts()
            responses = self.rollout(prompts, context, first_row)
            batch = replace_columns(responses, self.score(responses, context, rewards).result())
            takes_part = batch.batch["response_mask"].any(-1).numpy()
            yield Draw(batch, responses.non_tensor_batch["uid"], takes_part)
            first_row += len(prompts)

    def rollout(self, prompts: DataProto, context: StepContext, first_row: int = 0) -> DataProto:
        """Sample n responses per prompt, and the reward of a greedy response if the estimator reads it.

        ``first_row`` counts the prompts sampled earlier in the step, so that each ``uid`` is unique.
        """
        with context.stage("gen"):
            prompts = name_groups(prompts, context.number, first_row)
            prompts = prompts | DataProto(meta_info={"global_steps": context.number, "validate": False})
            repeated = repeat_prompts(prompts, self._n)
            responses, columns = self.responses.answer(repeated), repeated.select(batch_keys=[])
            if self._needs_greedy_baseline:
                columns = columns | self._greedy_baseline(prompts, context.number)
            return with_prompts(columns, responses)

    def _greedy_baseline(self, prompts: DataProto, step: int) -> DataProto:
        """Score a greedy response per prompt: ``reward_baselines`` and ``baseline_status``, repeated n times."""
        greedy = repeat_prompts(prompts, 1) | DataProto(meta_info={"do_sample": False})
        responses = with_prompts(greedy.select(batch_keys=[]), self.responses.answer(greedy))
        scores, extra = self.scorer.submit(responses, self.reward_fn, step).result()
        columns = {"reward_baselines": trajectory_scores(responses, scores)}
        scored = Trajectories.from_batch(responses).scored_rows
        statuses = {"baseline_status": np.array(extra["reward_status"], dtype=object)[scored]}
        baselines = DataProto.from_dict(tensors=columns, non_tensors=statuses)
        return baselines.repeat(self._n, interleave=True)

    def score(self, batch: DataProto, context: StepContext, rewards: RewardRecord) -> Deferred[DataProto]:
        """Start scoring responses, and wait for the scores unless ``reward_model.launch_reward_fn_async`` is set.

        Returns:
            :attr:`Experience.scores` of the batch; the scored batch joins ``rewards`` when they are there.
        """
        with context.stage("reward"):
            scoring = self.scorer.submit(batch, self.reward_fn, context.number)
        return self.take_scores(batch, scoring, context, rewards)

    def take_scores(
        self, batch: DataProto, scoring: Deferred[Scored], context: StepContext, rewards: RewardRecord
    ) -> Deferred[DataProto]:
        """As :meth:`score`, with scoring that has begun before."""
        columns = Deferred([], partial(self._scored_columns, batch, scoring, context, rewards))
        if self.config.reward_model.launch_reward_fn_async:
            return columns
        return Deferred.from_value(columns.result())

    def draw_of(self, batch: DataProto, scored: Scored) -> Draw:
        """Return what dynamic sampling reads of some samples.

        Raises:
            RewardError: a sample has no score, and ``reward_model.on_failure`` is ``stop``.
        """
        scores, extra = scored
        policy = self.config.reward_model.on_failure
        trained_on, _ = leave_out_failed(batch, extra["reward_status"], policy, self._compares_siblings)
        takes_part = trained_on.batch["response_mask"].any(-1).numpy()
        read = batch.select(batch_keys=["response_mask"]) | score_columns(scores, extra)
        return Draw(read, batch.non_tensor_batch["uid"], takes_part)

    def _scored_columns(
        self, batch: DataProto, scoring: Deferred[Scored], context: StepContext, rewards: RewardRecord
    ) -> DataProto:
        with context.stage("reward"):
            scores, extra = scoring.result()
            on_failure = self.config.reward_model.on_failure
            trained_on, rates = leave_out_failed(batch, extra["reward_status"], on_failure, self._compares_siblings)
            with context.stage("dump_rollout_generations"):
                if self.samples.folder is not None:
                    records = generation_records(context.number, self.tokenizer, batch, scores, extra, self.reward_fn)
                    self.samples.write(context.number, records, append=bool(rewards.batches))
            columns = trained_on | score_columns(scores, extra)
            rewards.add(replace_columns(batch, columns), list(extra), rates)
            return columns
