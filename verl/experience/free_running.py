"""Sampling that does not wait for the slowest response: ``trainer.v1.trainer_mode`` and ``fully_async``.

Prompts start as soon as the admission rule allows, each group of samples by itself. A step trains on the groups that
finished first (:mod:`verl.experience.store`); the others go on, by the next weights, where they were interrupted.

::

    colocated (one pool)     step 1                        step 2
    engines                  sample … interrupted          go on … interrupted
    training                                update 1                      update 2

    separate (two pools)
    engines                  sample ……………………… interrupted, new weights, go on ………………………
    training                 step 1 … update 1           step 2 … update 2

With ``max_off_policy_strategy=admit`` or ``wait`` no group is thrown away for its age: one that is due is waited for,
and with ``admit`` one that could become too old is not started yet. So long responses are as frequent among those that
are trained on as among those that were started. With ``drop`` they are rarer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.agents.manager import AgentLoopManager, check_failures
from verl.agents.partial_responses import from_batch
from verl.agents.worker import trajectory_id
from verl.config.async_plan import AsyncPlan
from verl.errors import CheckpointError, ProcessLostError, RolloutError
from verl.experience.admission import Admission
from verl.experience.background import RolloutPool
from verl.experience.dynamic_sampling import NOTABLE_BATCHES, too_few_message
from verl.experience.dynamic_sampling import PREFIX as FILTER_PREFIX
from verl.experience.group_scores import GroupScorer
from verl.experience.group_scores import from_batch as scores_from_batch
from verl.experience.group_scores import to_batch as scores_to_batch
from verl.experience.lockstep import Lockstep
from verl.experience.prompts import name_groups, repeat_prompts
from verl.experience.replay import record
from verl.experience.rewards import RewardRecord, Scored
from verl.experience.sequences import with_prompts
from verl.experience.source import Experience, ExperienceSource
from verl.experience.store import GroupStore, PromptGroup, copy_to_driver
from verl.experience.workers import CurrentWorkers
from verl.protocol import DataProto
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics
from verl.utils.run_log import ENGINES, clock
from verl.utils.step_context import StepContext
from verl.workers.rollout.columns import joined_rows
from verl.workers.rollout.request import RolloutOutput

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between liveness checks of the engines while a step waits."""
FIRST_NOTICE_S = 120.0
"""Log a wait this long with its reason, then each time it doubles."""
_ABOUT = "about_pending"
"""Entry of ``meta_info`` in the files of a checkpoint."""
_PARTIAL_PREFIX = "drawn-"
"""Prefix of the checkpoint's parts that hold responses under way."""


class _Wait:
    """Time that a step has waited, and the time of the next log message about it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._began, self._notice_s = time.monotonic(), FIRST_NOTICE_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_notice_due(self) -> bool:
        if self.seconds < self._notice_s:
            return False
        self._notice_s *= 2
        return True


class FreeRunning(ExperienceSource):
    """Samples groups one by one, across steps.

    Args:
        source: names prompts, and scores the batch of a step.
        plan: how old samples may become, and where engines run.
        agents: runs the samples; made with the first prompts.
        workers: returns the worker groups of the run.
        last_step: the last step of the run; no more groups are started than it and those before it take.
        pool: rollout engines with a pool of their own, which sample while a step trains; None for engines on the ranks
            of the policy.
    """

    def __init__(
        self,
        source: Lockstep,
        plan: AsyncPlan,
        agents: Callable[[], AgentLoopManager],
        workers: CurrentWorkers,
        last_step: int,
        pool: RolloutPool | None = None,
    ) -> None:
        self._source, self._plan, self._agents, self._workers = source, plan, agents, workers
        self._pool, self._last_step = pool, last_step
        self._record_dir = source.config.trainer.async_.record_dir
        self._batch_size = plan.batch_prompts
        self._n = source.config.actor_rollout_ref.rollout.n
        self._admission = Admission(plan.prompts_per_transfer, plan.prompts_ahead, None)
        """Limits the groups that may start; its versions count transfers of weights."""
        bound_of = {"admit": None, "wait": None, "drop": None} | {plan.strategy: plan.bound}
        admission = Admission(plan.batch_prompts, 0, bound_of["admit"])
        self._store = GroupStore(admission, drop_after=bound_of["drop"], wait_at=bound_of["wait"])
        self._scorer = GroupScorer(source, self._join)
        self._filters = source.config.algorithm.filter_groups
        self._filtered: list[PromptGroup] = []
        """Groups that dynamic sampling has dropped since a step took its groups."""
        self._num_filtered = 0
        self._waiting: deque[DataProto] = deque()
        """Prompts that were taken from the data and not started yet, one each."""
        self._started = 0
        self._dropped = 0
        self._stale = 0
        """Groups that were trained on after the engines had got newer weights than those with which they started."""
        self._steps = 0
        """Steps that have taken their groups. The bound counts them, because there are at least as many as updates."""
        self._updates = 0
        """Updates of the policy."""
        self._engine_steps = 0
        """Steps before the weights that the engines have."""
        self._updates_of_version: dict[int, int] = {}
        """Updates of the policy by the number that the engines give their weights."""
        self._metrics: Metrics = {}
        """Metrics of the next step about events between two steps."""
        self._serving: Future[float] | None = None
        """The engines on a pool of their own, while they serve; its result is when they ended."""
        self._served_from = 0.0
        """Time at which the engines began to serve, or up to which :attr:`_spans` covers it."""
        self._spans: list[tuple[str, float, float]] = []
        """Periods of the step in which the engines served."""
        self._served_others_s = 0.0
        """Seconds of the step in which the engines served validation."""
        self._manager: AgentLoopManager | None = None
        """Runs the groups under way."""
        self._trained_at: float | None = None
        """Time at which the previous step finished training."""
        self._must_rest = False
        self._wait = _Wait(0)

    # ---- the step -------------------------------------------------------------------------------

    def next(self, context: StepContext) -> Experience:
        """See :meth:`ExperienceSource.next`."""
        with context.stage("gen"):
            self._update_engines()
            dropped = self._store.drop_late(self._steps)
            self._running_agents().cancel([group.responses for group in dropped])
            self._dropped += len(dropped)
            self._start_groups()
            groups = self._wait_for_groups(context)
        self._store.take(groups)
        self._steps += 1
        batch = self._with_ages(joined_rows([self._join(group) for group in groups]))
        self._check_trajectories(batch)
        if self._record_dir is not None:
            record(Path(self._record_dir), context.number, batch)
        context.metrics |= self._metrics | self._measure(groups, dropped)
        self._metrics = {}
        rewards = RewardRecord()
        return Experience(batch, self._score(groups, batch, context, rewards), rewards)

    def _score(
        self, groups: Sequence[PromptGroup], batch: DataProto, context: StepContext, rewards: RewardRecord
    ) -> Deferred[DataProto]:
        """Return :attr:`Experience.scores` of the groups of a step; groups that were dropped join ``rewards``."""
        if not self._scorer.scores_groups:
            return self._source.score(batch, context, rewards)
        filtered, self._filtered = self._filtered, []
        scores, extra = self._scorer.joined([*groups, *filtered])

        def scores_of(rows: slice) -> Deferred[Scored]:
            return Deferred.from_value((scores[rows], {name: values[rows] for name, values in extra.items()}))

        size = len(batch)
        columns = self._source.take_scores(batch, scores_of(slice(size)), context, rewards)
        if filtered:
            dropped = joined_rows([self._join(group) for group in filtered])
            # For the record of rewards alone: nothing is trained on these rows.
            self._source.take_scores(dropped, scores_of(slice(size, None)), context, rewards).result()
        return columns

    def updated(self, version: int) -> None:
        """See :meth:`ExperienceSource.updated`."""
        self._updates += 1

    def trained(self, context: StepContext) -> None:
        """See :meth:`ExperienceSource.trained`; the step's spans get the times in which the engines served."""
        now = clock()
        if self.is_sampling and self._pool is not None and not self._pool.is_starting:
            self._add_span(now)
        context.spans += self._spans
        if self._pool is not None and self._trained_at is not None:
            elapsed = now - self._trained_at
            served = self._served_others_s + sum(end - start for _, start, end in self._spans)
            context.metrics["fully_async/trainer/idle_ratio"] = min(1.0, context.seconds["gen"] / elapsed)
            context.metrics["fully_async/rollouter/idle_ratio"] = max(0.0, 1 - served / elapsed)
        self._spans, self._trained_at, self._served_others_s = [], now, 0.0

    def _add_span(self, end: float) -> None:
        if end > self._served_from:
            self._spans.append((ENGINES, round(self._served_from, 4), round(end, 4)))
            self._served_from = end

    def _update_engines(self) -> None:
        """Give the engines new weights if it is time; those on the trainer's ranks have them always."""
        if self._pool is None:
            self._engine_steps = self._steps
        elif self._pool.is_starting:
            return  # enough groups may be finished for this step
        elif not self.is_sampling or self._transfers(self._steps) > self._transfers(self._engine_steps):
            # Not when the last transfer is sync_every steps ago: after a resume in between, prompts would run out.
            self._renew_weights()

    def _transfers(self, steps: int) -> int:
        """Return how many transfers of weights are due after so many steps."""
        return steps // self._plan.sync_every

    def _start_groups(self) -> None:
        active = self._started - self._dropped - self._num_filtered
        capacity = self._admission.capacity(self._transfers(self._engine_steps), active)
        for _ in range(min(capacity, self._last_step * self._batch_size - active)):
            if not self._waiting:
                prompts = self._source.next_prompts()
                self._waiting.extend(prompts.select_idxs([row]) for row in range(len(prompts)))
            step, row = divmod(self._started, self._batch_size)
            # The names are those of a run without asynchronous sampling.
            named = repeat_prompts(name_groups(self._waiting.popleft(), step + 1, row), self._n)
            self._begin(PromptGroup(self._started, named.with_meta_info({}), self._engine_steps))
            self._started += 1

    def _begin(self, group: PromptGroup, resume_from: Mapping[str, RolloutOutput] | None = None) -> None:
        step = group.index // self._batch_size + 1
        prompts = group.prompts.with_meta_info({"global_steps": step, "validate": False})
        group.responses = self._running_agents().submit(prompts, resume_from)
        self._scorer.follow(group)
        self._store.add(group)

    def _running_agents(self) -> AgentLoopManager:
        """Return what runs the groups under way; if that has ended, another one, which begins the unfinished anew.

        Called by the thread that takes prompts from the data alone.
        """
        if self._manager is None:
            self._manager = self._agents()
        elif self._manager.has_ended:
            groups = self._store.groups()
            is_whole = {group: group.has_responses for group in groups}
            for group in groups:
                if is_whole[group]:
                    group.hold()
            self._manager = self._agents()
            for group in groups:
                if not is_whole[group]:
                    self._begin(PromptGroup(group.index, group.prompts, self._engine_steps))
        return self._manager

    def _wait_for_groups(self, context: StepContext) -> list[PromptGroup]:
        self._wait = _Wait(context.number)
        while True:
            if self._pool is not None:
                self._serve(self._pool)
                self._wait_while_serving()
            elif not self._is_enough():
                agents = self._running_agents()
                agents.serve_until(self._workers().policy, self._is_enough)
                # An update that was skipped leaves the version as it is, and its weights are the newest all the same.
                self._updates_of_version[agents.weight_version] = self._updates
            self._store.raise_failure()
            groups = self._store.choice(self._steps)
            assert groups is not None, "the engines ended before a batch was complete"
            unscored = [group for group in groups if group.scores is None]
            if not unscored or not self._scorer.scores_groups:
                return groups
            with context.stage("reward"):
                self._scorer.score(unscored, context.number)

    def _is_enough(self) -> bool:
        """Return whether the step can take its groups; polled while it waits, and logs the reason of a long wait.

        The thread that takes prompts from the data waits meanwhile, if it is not the one that calls.
        """
        self._store.raise_failure()
        self._replace_uninformative()
        if self._store.choice(self._steps) is not None:
            return True
        if self._wait.is_notice_due():
            logger.warning("%s", self._describe_wait())
        return False

    def _replace_uninformative(self) -> None:
        """Drop the groups that dynamic sampling rejects, and start others in their place.

        Raises:
            RewardError: too many samples of dropped groups, and of those that wait for a step, could not be scored.
            RolloutError: too many of their trajectories failed, or ``max_num_gen_batches`` batches were not enough.
        """
        dropped = self._store.drop_uninformative()
        if not dropped:
            return
        size = self._batch_size
        for group in dropped:
            group.hold()
            self._filtered.append(group)
            if len(self._filtered) % size == 0:  # a trajectory that always fails would otherwise be replaced for ever
                seen = [*self._filtered[-size:], *(group for group in self._store.groups() if group.is_finished)]
                # Both calls only check here: they raise if too many samples failed.
                self._scorer.joined(seen)
                self._check_trajectories(joined_rows([self._join(group) for group in seen]))
                batches = len(self._filtered) // size
                level = logging.INFO if batches % NOTABLE_BATCHES else logging.WARNING
                logger.log(level, "dynamic sampling: %d prompts dropped for one step", len(self._filtered))
        self._num_filtered += len(dropped)
        num_scored, num_informative = len(self._scorer.values), sum(group.is_finished for group in self._store.groups())
        limit = self._filters.max_num_gen_batches * size
        if limit and num_scored >= limit and num_informative < size:
            values = np.concatenate(list(self._scorer.values))
            raise RolloutError(too_few_message(self._filters, num_informative, num_scored, size, values))
        self._start_groups()

    def _check_trajectories(self, batch: DataProto) -> None:
        if "trajectory_status" in batch.non_tensor_batch:
            check_failures(batch, self._source.config.actor_rollout_ref.rollout.agent)

    def _describe_wait(self) -> str:
        running = [group for group in self._store.groups() if not group.is_finished]
        text = (
            f"step {self._wait.step} has waited for {self._wait.seconds:.0f} s. Of {self._batch_size} prompts, "
            f"{len(self._store) - len(running)} are finished, {len(running)} are under way"
        )
        if scoring := sum(group.has_responses for group in running):
            text += f", {scoring} of them with all their responses and not scored yet"
        if running:
            uid, age_s = running[0].prompts.non_tensor_batch["uid"][0], time.monotonic() - running[0].started_at
            text += f", the oldest ({uid}) for {age_s:.0f} s"
        state = self._running_agents().progress()
        return (
            f"{text}. Of {state.running} samples {state.at_engines} have a request at the engines, of which "
            f"{state.waiting_requests} wait for a place; {state.running - state.at_engines} are in tools or programs."
        )

    # ---- engines on a pool of their own ---------------------------------------------------------

    def _serve(self, pool: RolloutPool) -> None:
        """Let the engines serve in the background, if they do not yet."""
        if self._serving is not None:
            return
        self._must_rest = False
        agents, group = self._running_agents(), self._workers().policy

        def serve() -> float:
            try:
                agents.serve_until(group, lambda: self._must_rest)
                return clock()
            except ProcessLostError as error:
                served_until = clock()
                pool.replace(error)  # here, so that the main thread can train meanwhile
                return served_until

        self._served_from = clock()
        self._serving = pool.thread.submit(serve)
        self._serving.add_done_callback(lambda _: self._wake_waiting())

    @property
    def is_sampling(self) -> bool:
        """See :attr:`ExperienceSource.is_sampling`."""
        return self._serving is not None and not self._serving.done()

    def _wake_waiting(self) -> None:
        with self._store.changed:
            self._store.changed.notify_all()

    def _wait_while_serving(self) -> None:
        while not self._is_enough():
            if not self.is_sampling:  # other engines have been started
                self._renew_weights()
                self._start_groups()
            with self._store.changed:
                if self._store.choice(self._steps) is None:
                    self._store.changed.wait(POLL_S)

    def _renew_weights(self) -> None:
        """Give engines on a pool of their own the newest weights; they go on serving if they did."""
        if self._end_serving() and self._pool is not None:
            self._serve(self._pool)

    def _end_serving(self) -> bool:
        """Stop engines on a pool of their own, and give them the newest weights; return whether they served."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._must_rest = True
            self._add_span(serving.result())
        if self._pool is not None:
            self._metrics |= self._pool.update(self._updates)
            self._updates_of_version[self._updates] = self._updates
            self._engine_steps = self._steps
            if self._manager is not None:  # if it has ended, others who ask for agents would lose its finished groups
                self._running_agents()
        return serving is not None

    @contextmanager
    def rest(self) -> Iterator[None]:
        """See :meth:`ExperienceSource.rest`; engines on a pool of their own get the newest weights."""
        has_served, began = self._end_serving(), clock()
        yield
        self._served_others_s += clock() - began
        if self._pool is None:  # samples under way were served too, if the engines have served by the agents
            self._updates_of_version.setdefault(self._running_agents().weight_version, self._updates)
        elif has_served:
            self._serve(self._pool)

    def replace_lost(self, error: ProcessLostError) -> None:
        """See :meth:`ExperienceSource.replace_lost`."""
        if self._pool is None:
            raise error
        self._pool.replace(error)

    def close(self) -> None:
        """See :meth:`ExperienceSource.close`."""
        self._must_rest = True
        self._scorer.close()
        if self._manager is not None:
            self._manager.cancel([group.responses for group in self._store.groups()])

    # ---- batches ----------------------------------------------------------------------------------

    def _join(self, group: PromptGroup) -> DataProto:
        return with_prompts(group.prompts.select(batch_keys=[]), group.responses.result()).with_meta_info({})

    def _with_ages(self, batch: DataProto) -> DataProto:
        """Add ``updates_behind``, (bsz, response_length): updates since the weights that drew a token; else -1."""
        versions = batch.batch["weight_versions"]
        behind = torch.full_like(versions, -1)
        for version in versions.unique().tolist():
            if version >= 0:
                behind[versions == version] = self._updates - self._updates_of_version[version]
        return batch | DataProto.from_dict(tensors={"updates_behind": behind})

    def _measure(self, groups: Sequence[PromptGroup], dropped: Sequence[PromptGroup]) -> Metrics:
        """Metrics of the queue, under the public names of V1 and fully_async."""
        running = sum(not group.is_finished for group in self._store.groups())
        seconds = [group.finished_at - group.started_at for group in groups if group.finished_at is not None]
        times = {"avg": np.mean(seconds), "max": max(seconds), "min": min(seconds)}
        times |= {f"tp{share}": np.percentile(seconds, share) for share in (50, 95, 99)}
        newest = self._transfers(self._engine_steps)
        self._stale += sum(newest > self._transfers(group.version) for group in groups)
        counts = {
            "current_param_version": newest,
            "stale_trajectory_processed": self._n * self._stale,
            # A sample of these names is a prompt with all its responses.
            "total_generated_samples": self._started - self._dropped - running,
            "staleness_samples": len(self._store),
            "dropped_stale_samples": self._dropped,
        }
        return {
            **(self._measure_filter() if self._filters.enable else {}),
            **{f"fully_async/count/{name}": value for name, value in counts.items()},
            **{f"fully_async/processing_time/{name}": float(value) for name, value in times.items()},
            "training/off_policy/evicted_samples": self._n * len(dropped),
            "async/groups/running": running,
            "async/groups/finished": len(self._store) - running,
        }

    def _measure_filter(self) -> Metrics:
        """Metrics of dynamic sampling, of the groups that were scored since a step took its groups."""
        values = [self._scorer.values.popleft() for _ in range(len(self._scorer.values))]
        metric_values = np.concatenate([np.zeros(0), *values])
        counts: Metrics = {
            "num_gen_batches": len(values) / self._batch_size,
            "dropped_prompts": float(len(self._filtered)),
        }
        if values:
            counts["kept_ratio"] = 1 - len(self._filtered) / len(values)
        if len(metric_values):
            counts[f"{self._filters.metric}/mean"] = float(metric_values.mean())
        return {f"{FILTER_PREFIX}/{name}": value for name, value in counts.items()}

    # ---- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ExperienceSource.state_dict`; prompts and responses themselves are in :meth:`pending`."""
        counts = {"started": self._started, "dropped": self._dropped, "steps": self._steps, "updates": self._updates}
        counts |= {"stale": self._stale, "filtered": self._num_filtered}
        return counts | {"updates_of_version": list(self._updates_of_version.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ExperienceSource.load_state_dict`.

        Raises:
            CheckpointError: the checkpoint is of a run with another mode.
        """
        if "started" not in state:
            raise CheckpointError(
                "the checkpoint is of a run that sampled whole batches (trainer.v1.trainer_mode=sync) or replayed a "
                "recorded run (trainer.async.replay), and this run samples group by group. Resume with the settings "
                "of the checkpoint."
            )
        self._started, self._dropped = state["started"], state["dropped"]
        self._steps = self._engine_steps = state["steps"]
        self._updates, self._stale = state["updates"], state.get("stale", 0)
        self._num_filtered = state.get("filtered", 0)
        self._updates_of_version = dict(state["updates_of_version"])

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """See :meth:`ExperienceSource.pending`: groups with their responses, or what there is of single turns."""
        is_transfer_due = self.is_sampling and self._transfers(self._steps) > self._transfers(self._engine_steps)
        rests = is_transfer_due and self._pool is not None and not self._pool.is_starting
        # Engines of a pool are interrupted by the transfer; without one, tokens since the last one are drawn again.
        with self.rest() if rests else nullcontext():
            agents = None if self._manager is None or self._manager.has_ended else self._manager
            partial_responses = (
                [] if agents is None else [copy_to_driver(batch) for batch in agents.partial_responses()]
            )
        groups = self._store.groups()
        answered = [group for group in groups if group.has_responses]
        for group in answered:
            group.hold()
        parts = {
            "prompts": [(group, group.prompts) for group in groups],
            "responses": [(group, group.responses.result()) for group in answered],
        }
        scores = scores_to_batch(answered)
        waiting = list(self._waiting)

        def batches() -> dict[str, DataProto]:
            files = {name: _join_groups(named_parts) for name, named_parts in parts.items() if named_parts}
            if waiting:
                files["waiting"] = DataProto.concat(waiting)
            named = {f"{_PARTIAL_PREFIX}{part}": batch for part, batch in enumerate(partial_responses)}
            return files | named | ({"scores": scores} if len(scores) else {})

        # Most states are never written, so they are not put together yet.
        return Deferred([], batches)

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """See :meth:`ExperienceSource.load_pending`; responses of single turns go on, those of agents begin anew."""
        if "waiting" in batches:
            waiting = batches["waiting"]
            self._waiting = deque(waiting.select_idxs([row]) for row in range(len(waiting)))
        responses = {index: part for index, _, part in self._parts(batches, "responses")}
        scores = scores_from_batch(batches["scores"]) if "scores" in batches and self._scorer.scores_groups else {}
        resume_from: dict[str, RolloutOutput] = {}
        for name, batch in batches.items():
            resume_from |= from_batch(batch) if name.startswith(_PARTIAL_PREFIX) else {}
        for index, version, prompts in self._parts(batches, "prompts"):
            columns = prompts.non_tensor_batch
            names = map(trajectory_id, columns["uid"], columns["sample_index"])
            group_responses = {name: resume_from[name] for name in names if name in resume_from}
            # Those without a token begin with the weights that there are now.
            group = PromptGroup(index, prompts, version if index in responses or group_responses else self._steps)
            if index in responses:
                group.responses.set_result(responses[index])
                if index in scores:
                    group.scores = Future()
                    group.scores.set_result(self._scorer.judge(self._join(group), scores[index]))
                self._scorer.follow(group)
                self._store.add(group)
            else:
                self._begin(group, group_responses)

    def _parts(self, batches: Mapping[str, DataProto], name: str) -> Iterator[tuple[int, int, DataProto]]:
        if name not in batches:
            return
        batch = batches[name]
        about, start = batch.meta_info[_ABOUT], 0
        for index, version, rows in about:
            yield index, version, batch.slice(start, start + rows).with_meta_info({})
            start += rows


def _join_groups(parts: Sequence[tuple[PromptGroup, DataProto]]) -> DataProto:
    """Join what there is of each group; ``meta_info`` says whose rows they are."""
    about = [[group.index, group.version, len(part)] for group, part in parts]
    return joined_rows([part for _, part in parts]).with_meta_info({_ABOUT: about})
