"""The training step of PPO, GRPO and related algorithms on the driver: its stages, their order and their columns.

::

    dataloader ──► prompts          input_ids, attention_mask, position_ids, raw_prompt, uid
       │ repeat(n)                                                   these three: verl/experience/lockstep.py
       ▼
    rollout    ──► responses        prompts, responses, response_mask, rollout_log_probs
       ▼
    reward     ──► scores           token_level_scores               (experience/scoring.py, reward_manager/)
       │ with dynamic sampling: back to the dataloader until the batch is full of informative prompts
       ▼
    actor      ──► old_log_probs    old_log_probs, entropys          or the rollout's, in bypass mode; or those
       │                                                             of the update itself (old_log_probs.py)
    driver     ──► correction       rollout_is_weights, accepted_mask                if it is on
    reference  ──► ref_log_prob     ref_log_prob                     if a KL term is on
    critic     ──► values           values                           if the estimator reads it
    teacher    ──► teacher_logprobs teacher_logprobs, ...            with distillation (distillation.py)
       ▼
    driver     ──► advantages       token_level_rewards, advantages, returns        (verl/algorithms)
       │ without what the correction rejected; with PF-PPO, resampled by score
       ▼
    critic.update, actor.update ──► metrics; the next rollout uses the new weights

A stage returns only its new columns, which ``step`` adds to the batch, and puts its metrics into the context of the
step. The batch stays in the order of the data; each worker call reorders rows for its ranks and restores the order
(``trainer/balance.py``).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.algorithms import (
    RoleBaselines,
    adv_needs,
    compute_pf_ppo_reweight_data,
    get_entropy_controller,
    get_kl_controller,
)
from verl.base.redact import secrets_in
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.states import rng_state, set_rng_state
from verl.config import PPOConfig
from verl.config.async_plan import AsyncPlan
from verl.datasets import collate_fn as default_collate_fn
from verl.datasets.loading import bound_to_driver
from verl.datasets.sampler import AbstractCurriculumSampler
from verl.errors import ConfigError, DataError, ProcessLostError
from verl.experience.ahead import Ahead
from verl.experience.background import PromptsTakenFirst, RolloutPool, SerialThread
from verl.experience.free_running import FreeRunning
from verl.experience.lockstep import Lockstep
from verl.experience.off_policy import off_policy_metrics
from verl.experience.records import RecordFolder
from verl.experience.replay import Replay
from verl.experience.response_source import ResponseSource
from verl.experience.rewards import EqualScores, RewardRecord, Scored
from verl.experience.scoring import Scorer
from verl.experience.sequences import Trajectories, mini_batch_sizes, resampled
from verl.experience.source import ExperienceSource
from verl.experience.trajectories import trajectory_metrics
from verl.experience.workers import ExperienceWorkers
from verl.protocol import DataProto, DataProtoFuture, replace_columns
from verl.protocol.future import wait_for
from verl.tracking import Tracking, ValidationGenerationsLogger
from verl.trainer.balance import DealtBatch, deal
from verl.trainer.config.load import load_config
from verl.trainer.config.sizes import derived_sizes, resolve_device
from verl.trainer.driver import load_controller
from verl.trainer.loop import Schedule, TrainingLoop
from verl.trainer.ppo import stages
from verl.trainer.ppo.distillation import Teachers, distillation_metrics
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_mfu_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    sampling_mask_metrics,
)
from verl.trainer.ppo.observers import Observers
from verl.trainer.ppo.old_log_probs import OldLogProbs
from verl.trainer.ppo.privileged import PrivilegedPrompts
from verl.trainer.ppo.profiling import StepProfiles
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode
from verl.trainer.ppo.rows import prompt_settings, rl_datasets
from verl.trainer.ppo.stages import ACTOR_COLUMNS, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.token_dump import TokenDump
from verl.trainer.ppo.validation import Validator
from verl.trainer.roles import (
    Needs,
    Role,
    teachers_share_actor_ranks,
    worker_arguments,
)
from verl.trainer.worker_groups import WorkerGroups
from verl.utils.console import status
from verl.utils.deferred import Deferred
from verl.utils.flops_counter import Arithmetic
from verl.utils.metric import Metrics
from verl.utils.step_context import StepContext
from verl.workers.transfer import WeightTransfer

if TYPE_CHECKING:
    from torch.utils.data import Sampler
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.experience.judge import ServedJudge
    from verl.single_controller.base.resource_pool import PoolManager
    from verl.single_controller.base.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass
class PPOStepContext(StepContext):
    """Metrics, times, FLOPs and tokens of one PPO step."""

    generated_tokens: int = 0
    """Tokens of all responses sampled in the step, those that dynamic sampling dropped too."""


class PPOTrainer(TrainingLoop):
    """Train a policy by reinforcement learning.

    A subclass may replace :meth:`step`, a stage of it, or how responses are sampled and scored
    (:attr:`experience_class`). One that writes all of ``fit`` derives from ``RayPPOTrainer`` instead
    (:mod:`verl.compat.own_fit`), which has the parts for that.

    Args:
        config: the whole configuration, typed or as composed by Hydra.
        role_worker_mapping: worker class of each role.
        resource_pool_manager: the assignment of roles to pools of processes.
        ray_worker_group_cls: the controller's class, RayWorkerGroup or LocalWorkerGroup; by default the one that
            ``trainer.controller`` names.
        reward_fn: the reward manager of training.
        val_reward_fn: the reward manager of validation; without it there is no validation. Without either, both are
            those of the configuration, and ``async_rollout_manager.generate_sequences`` scores what it generates
            (``rm_scores``; :func:`verl.trainer.ppo.reward.extract_reward`).
        train_dataset: a map-style dataset of prompts; None reads those of ``data.train_files`` and ``data.val_files``.
        val_dataset: likewise, for validation.
        collate_fn: turns a list of items into the columns of a batch.
        device_name: ``cuda`` or ``cpu``; None for what the machine has.
        judge: the generative reward model that the reward functions ask, if the run has one.
    """

    typed_config: PPOConfig

    context_class: ClassVar[type[PPOStepContext]] = PPOStepContext
    experience_class: ClassVar[type[Lockstep]] = Lockstep
    """Samples and scores; made anew whenever workers start."""
    default: ClassVar[type[PPOTrainer]]
    """Class that a run without one of its own uses. ``verl.compat`` sets it to ``RayPPOTrainer``, so that patches of
    that class by users apply."""

    experience: ExperienceSource
    policy_workers: Any = None
    """Workers of the policy, and of rollout unless that has a pool of its own (:attr:`rollout_workers`)."""
    critic_workers: Any = None
    reference_workers: WorkerGroup | None = None
    """Workers of the reference policy; None without one, and where it is the policy without its adapters."""
    reward_workers: WorkerGroup | None = None
    """Workers of the reward model or of the judge."""
    teacher_workers: WorkerGroup | None = None
    """Workers of the teachers of distillation."""
    validation_generations_logger: ValidationGenerationsLogger | None = None
    """Logger of validation samples."""
    train_dataset: Any = None
    val_dataset: Any = None
    train_sampler: Sampler | None = None
    val_dataloader: StatefulDataLoader | None = None

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: PoolManager,
        ray_worker_group_cls: type | None = None,
        processor: ProcessorMixin | None = None,
        reward_fn: Callable | None = None,
        val_reward_fn: Callable | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable | None = None,
        train_sampler: Sampler | None = None,
        device_name: str | None = None,
        judge: ServedJudge | None = None,
    ) -> None:
        config = config if isinstance(config, PPOConfig) else load_config(config, for_program=True)
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls or load_controller(config.trainer.controller).WorkerGroup
        self.device_name = device_name or resolve_device(config)
        worker_groups = WorkerGroups(
            worker_classes=role_worker_mapping,
            pools=resource_pool_manager,
            group_class=self.ray_worker_group_cls,
            device_name=self.device_name,
            start_timeout_s=config.trainer.ray_wait_register_center_timeout,
            hang_timeout_s=config.trainer.recovery.hang_timeout_s,
        )
        super().__init__(config, CheckpointPlan.from_ppo_config(config.trainer), worker_groups)
        self.tokenizer = tokenizer
        self.processor = processor
        self.scores_responses = reward_fn is None and val_reward_fn is None
        if self.scores_responses:
            arguments = {} if judge is None else judge.arguments
            reward_fn, val_reward_fn = (
                load_reward_manager(config, tokenizer, num_examine, **arguments) for num_examine in (0, 1)
            )
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.needs = Needs.from_config(config)
        self.teachers = Teachers(config) if self.needs.teacher else None
        self.privileged = None
        if config.distillation.is_self_distillation:
            settings = config.distillation.self_distillation
            self.privileged = PrivilegedPrompts(settings, prompt_settings(config), tokenizer, processor)
        with_kl = config.algorithm.use_kl_in_reward
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl) if with_kl else None
        self.entropy_ctrl = get_entropy_controller(config.actor_rollout_ref.actor)
        self.controllers["entropy_ctrl"] = self.entropy_ctrl
        if self.kl_ctrl_in_reward is not None:
            self.controllers["kl_ctrl"] = self.kl_ctrl_in_reward
        reads_roles = "role_baselines" in adv_needs(config.algorithm.adv_estimator).columns
        self.role_baselines = RoleBaselines(config.algorithm.rae_decay) if reads_roles else None
        if self.role_baselines is not None:
            self.controllers["role_baselines"] = self.role_baselines
        self.dump = RecordFolder(config.trainer.rollout_data_dir, secrets_in(config.to_dict()))
        trainer = config.trainer
        self.token_dump = TokenDump(trainer.rollout_data_dir, tokenizer, trainer.rollout_token_dump_freq)
        self.equal_scores = EqualScores(tokenizer)
        self.judge = judge
        if self.needs.judge and judge is None:
            raise ConfigError(
                f"reward_model.rollout.name={config.reward_model.rollout.name} serves a judge to the reward function, "
                "so the trainer needs judge=verl.plugins.endpoint.judge.JudgeService(config)."
            )
        self.response_source = ResponseSource(config, tokenizer, processor, self._experience_workers, judge)
        self.scorer = Scorer(config, self._experience_workers, judge)
        self._sampling_thread = SerialThread("sampling")
        self._weight_transfer = WeightTransfer.from_config(config.actor_rollout_ref)
        self.validation_order = self.loader_generator()
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._plan_steps()
        self.observers = Observers(config, tokenizer, self.total_training_steps)
        self.observe_stage = self.observers.stage

    # ---- set-up -------------------------------------------------------------------------------

    def _create_dataloader(
        self, train_dataset: Any, val_dataset: Any, collate_fn: Callable | None, train_sampler: Sampler | None
    ) -> None:
        """Create the data loaders; one of a subclass sets ``train_dataloader`` and may set the other attributes.

        These are ``val_dataloader``, ``train_dataset``, ``val_dataset``, ``train_sampler`` and
        ``total_training_steps``.
        """
        data = self.typed_config.data
        if train_dataset is None:
            train_dataset, val_dataset, train_sampler = rl_datasets(self.typed_config, self.tokenizer, self.processor)
        common: dict[str, Any] = {
            "collate_fn": collate_fn or default_collate_fn,
            "num_workers": min(data.dataloader_num_workers, os.cpu_count() or 1),
            "worker_init_fn": bound_to_driver(),
        }
        self.train_dataset, self.val_dataset, self.train_sampler = train_dataset, val_dataset, train_sampler
        key = "gen_batch_size" if data.gen_batch_size not in (None, data.train_batch_size) else "train_batch_size"
        self.train_dataloader = StatefulDataLoader(
            train_dataset,
            batch_size=data[key],
            sampler=train_sampler,
            drop_last=True,
            generator=self.loader_generator(),
            **common,
        )
        if len(self.train_dataloader) == 0:
            raise DataError(
                f"the training data has {len(train_dataset)} prompts (after filters), fewer than one batch of "
                f"data.{key}={data[key]}. Give more data, or lower data.{key}."
            )
        self.total_training_steps = derived_sizes(self.typed_config, len(train_dataset)).total_steps
        if val_dataset is not None:
            self.val_dataloader = StatefulDataLoader(
                val_dataset,
                batch_size=data.val_batch_size or len(val_dataset),
                shuffle=data.validation_shuffle,
                generator=self.validation_order,
                **common,
            )

    def _plan_steps(self) -> None:
        """Let the number of steps decide the schedules of the run.

        Raises:
            ConfigError: a ``_create_dataloader`` of a subclass created no loader.
        """
        if not hasattr(self, "train_dataloader"):
            raise ConfigError(
                f"{type(self).__name__}._create_dataloader replaces verl's and sets no self.train_dataloader. Set it "
                "to a torchdata StatefulDataLoader of prompts, and self.total_training_steps to the steps of the run."
            )
        if not hasattr(self, "total_training_steps"):
            trainer = self.typed_config.trainer
            epochs = len(self.train_dataloader) * trainer.total_epochs
            self.total_training_steps = trainer.total_training_steps or epochs
        self.typed_config = self.typed_config.with_schedules(self.total_training_steps)
        self.schedule = Schedule.from_config(self.typed_config.trainer, self.total_training_steps)
        self.profiles = StepProfiles(self.typed_config, self.total_training_steps)

    def start_workers(self) -> None:
        """See :meth:`TrainingLoop.start_workers`."""
        groups = self.worker_groups.start(self.worker_arguments())
        self.policy_workers = groups.get(Role.ActorRollout) or groups[Role.Actor]
        self.critic_workers = groups.get(Role.Critic)
        self.reference_workers = groups.get(Role.RefPolicy)
        self.reward_workers = groups.get(Role.RewardModel)
        self.teacher_workers = groups.get(Role.TeacherModel)
        self._use_workers()
        self.observers.watch(self.rollout_workers)

    def end_workers(self) -> None:
        """See :meth:`TrainingLoop.end_workers`."""
        self._end_sampling()
        self.observers.unwatch()
        super().end_workers()

    def _end_sampling(self) -> None:
        if hasattr(self, "experience"):  # workers that never started have none
            self.experience.close()
        self.response_source.end_agent_loops()
        if self.judge is not None:
            self.judge.cancel()

    def restart_rollout_pool(self) -> bool:
        """See :meth:`TrainingLoop.restart_rollout_pool`."""
        if self.worker_groups.lost_pools != {self.resource_pool_manager.mapping.get(Role.Rollout)}:
            return False
        self._end_sampling()
        self._start_rollout_pool()
        self._begin_sampling()
        return True

    def worker_arguments(self) -> dict[Role, dict[str, object]]:
        """Return the constructor arguments of each role's workers, in the order in which their models load.

        A subclass may add a role of ``role_worker_mapping``; its worker group is then ``worker_groups.groups[role]``.
        """
        return worker_arguments(self.typed_config, self.needs)

    def _use_workers(self) -> None:
        """Learn from newly started workers what the steps need to know, and let checkpoints save these."""
        self.pass_limits.send_to(group for group in self._groups_by_role.values() if group is not None)
        self.old_log_probs_plan = OldLogProbs.from_config(
            self.typed_config, self.policy_workers.training_randomness()[0]
        )
        logger.info("%s", self.old_log_probs_plan)
        actor = Arithmetic.from_ranks(self.policy_workers.arithmetic())
        self.arithmetic = {"old_log_prob": actor, "update_actor": actor}
        if self.critic_workers:
            self.arithmetic["update_critic"] = Arithmetic.from_ranks(self.critic_workers.arithmetic())
        self.checkpoint.workers_replaced(self.trained_groups)
        self._begin_sampling()
        self.validator = None
        if self.val_dataloader is not None and self.val_reward_fn is not None:
            self.validator = Validator(
                self.typed_config,
                self.tokenizer,
                self.response_source.answer,
                self._score,
                self.val_reward_fn,
                self.val_dataloader,
            )

    def _begin_sampling(self) -> None:
        self.experience = self._experience_source()
        self.controllers["experience"] = self.experience

    def _experience_source(self) -> ExperienceSource:
        """Make what samples and scores, for the workers as they are now."""
        config, steps, pool = self.typed_config, self.total_training_steps, None
        prompts = PromptsTakenFirst(self.next_batch)
        lockstep = self.experience_class(
            config, self.tokenizer, prompts, self.response_source, self.scorer, self.reward_fn, self.dump
        )
        plan, folder = AsyncPlan.from_config(config), config.trainer.async_.replay
        self._sampling_thread.close()
        # A new one, because the last may wait for a slow reward of a batch that nobody needs any more.
        self._sampling_thread = SerialThread("sampling")
        if self.rollout_workers is not self.policy_workers:
            takes_first = not config.algorithm.filter_groups.enable
            pool = RolloutPool(
                self._sampling_thread, prompts, takes_first, self._send_weights, self._replace_rollout_pool
            )
        if folder is not None:
            return Replay(lockstep, Path(folder), pool)
        if plan.is_free_running:
            agents, workers = self.response_source.agents, self._experience_workers
            return FreeRunning(lockstep, plan, agents, workers, steps, pool)
        if plan.lag or pool is not None:
            return Ahead(lockstep, plan.lag, steps, pool)
        return lockstep

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """See :meth:`TrainingLoop.pending`."""
        return self.experience.pending()

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """See :meth:`TrainingLoop.load_pending`."""
        self.experience.load_pending(batches)

    @property
    def trained_groups(self) -> Mapping[str, WorkerGroup]:
        """See :meth:`TrainingLoop.trained_groups`."""
        groups = {"actor": self.policy_workers, "critic": self.critic_workers}
        return {name: group for name, group in groups.items() if group is not None}

    @property
    def _groups_by_role(self) -> dict[str, WorkerGroup | None]:
        return {
            "actor_rollout": self.policy_workers,
            "ref": self.reference_workers,
            "critic": self.critic_workers,
            "rm": self.reward_workers,
            "teacher": self.teacher_workers,
        }

    def new_context(self) -> PPOStepContext:
        """See :meth:`TrainingLoop.new_context`."""
        return self.context_class(self.global_steps, observe=self.observe_stage)

    def observed(self, context: StepContext) -> AbstractContextManager[None]:
        """See :meth:`TrainingLoop.observed`: profiles of the steps of ``global_profiler.steps``."""
        return self.profiles.profile_step(context.number, self._groups_by_role)

    @property
    def rollout_workers(self) -> Any:
        """Workers whose engines sample: those of the policy, or with ``hybrid_engine=false`` a pool of their own."""
        return self.worker_groups.groups.get(Role.Rollout, self.policy_workers)

    @property
    def busy_role(self) -> Role | None:
        """See :attr:`TrainingLoop.busy_role`."""
        return Role.Rollout if Role.Rollout in self.worker_groups.groups and self.experience.is_sampling else None

    def _send_weights(self, version: int) -> Metrics:
        """Send the weights of the policy, after ``version`` updates, to rollout engines with a pool of their own."""
        return self._weight_transfer.update(self.policy_workers, self.rollout_workers, version)

    def _replace_rollout_pool(self, error: ProcessLostError) -> None:
        """Start the rollout pool anew if it or the router of its requests was lost, and nothing else; else raise."""
        lost = self.worker_groups.lost_pools
        agents = self.response_source.agent_loops
        if lost - {self.resource_pool_manager.mapping[Role.Rollout]} or not (lost or (agents and agents.has_ended)):
            raise error
        self.recovery.replace(error, self._start_rollout_pool)

    def _start_rollout_pool(self) -> None:
        self.worker_groups.replace(Role.Rollout)
        self.observers.unwatch()
        self.observers.watch(self.rollout_workers)

    def _experience_workers(self) -> ExperienceWorkers:
        return ExperienceWorkers(self.rollout_workers, self.reward_workers)

    # ---- the step -----------------------------------------------------------------------------

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """Convert collated rows to a batch of prompts."""
        return DataProto.from_single_dict(dict(rows))

    def step(self, context: PPOStepContext) -> DataProto:
        """Run one PPO iteration: sample, score, compute advantages and update; see the module's picture.

        Returns:
            the responses with all columns of the step, including those that the update left out.
        """
        trains = not self.typed_config.trainer.rollout_only
        updates_actor = trains and context.number > self.typed_config.trainer.critic_warmup
        # If a batch is one optimizer step, the update's own forward pass gives old_log_probs.
        own_forward = updates_actor and self.old_log_probs_plan.source == "update"
        experience = self.experience.next(context)
        batch = experience.batch
        rollout = self.typed_config.actor_rollout_ref.rollout
        if rollout.keep_sampling_mask:
            context.metrics |= sampling_mask_metrics(batch, rollout.top_k)
        if not own_forward and self.old_log_probs_plan.source != "interpolation":
            batch = batch | self.old_log_probs(batch, context)
        batch = replace_columns(batch, experience.scores.result())
        self.policy_metrics(batch, context)
        if self.needs.correction and not own_forward:
            batch = batch | self.correction(batch, context)
        if self.needs.reference:
            batch = batch | self.reference(batch, context)
        if self.needs.critic:
            batch = batch | self.values(batch, context)
        if self.needs.teacher:
            batch = batch | self.teacher(batch, context)
        batch = batch | self.advantages(batch, context)
        training_rows = self.select_training_rows(batch, context)
        if trains and self.needs.critic:
            with context.stage("update_critic"):
                wait_for(self.update_critic(training_rows, context))
        if updates_actor:
            with context.stage("update_actor"):
                updated = wait_for(self.update_actor(training_rows, context, own_forward))
            if not self.typed_config.algorithm.use_pf_ppo:  # the rows that it drew are not those of the batch
                batch = batch | updated
            self.experience.updated(context.number)
        if own_forward:
            self.policy_metrics(batch, context)
            if self.needs.correction:  # the weights that the update made, for metrics and dumps
                batch = batch | self.correction(batch, context)
        self.report(batch, experience.rewards, context)
        return batch

    def report(self, batch: DataProto, rewards: RewardRecord, context: PPOStepContext) -> None:
        """Pass what the step sampled to its metrics, the data set, files and traces.

        Args:
            batch: what :meth:`step` returns.
            rewards: all responses scored for the step.
            context: takes the metrics.
        """
        self.experience.trained(context)
        context.generated_tokens = rewards.generated_tokens()
        context.metrics |= rewards.metrics() | trajectory_metrics(rewards.batches) | off_policy_metrics(batch)
        if self.needs.teacher:
            context.metrics |= distillation_metrics(batch)
        distillation = self.typed_config.distillation
        if (
            not distillation.replaces_rewards or distillation.is_self_distillation
        ):  # a template may show the best response
            self.equal_scores.check(rewards)
        self._notify_dataset(batch, rewards)
        self.dump_numbers(batch, context)
        self.observers.trace(rewards.batches, context)

    def old_log_probs(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute old_log_probs and entropys of the policy before the update; in bypass mode take the rollout's."""
        with context.stage("old_log_prob"):
            if self.typed_config.algorithm.rollout_correction.bypass_mode:
                bypass = DataProto(batch=batch.batch.copy())
                apply_bypass_mode(bypass)
                return bypass.select(batch_keys=["old_log_probs"])
            shares = self.typed_config.actor_rollout_ref.actor.use_prefix_grouper
            repeated = stages.repeated_prompts(batch, [len(batch)]) if shares else ()
            counts = stages.token_counts(batch)
            context.flops["old_log_prob"] = self.arithmetic["old_log_prob"].forward_flops(*counts, repeated)
            return self._by_row(self.policy_workers, "compute_log_prob", batch)

    def policy_metrics(self, batch: DataProto, context: PPOStepContext) -> None:
        """Measure the entropy of the policy before the update and its distance to the rollout; adapt the entropy bonus.

        Runs after the scores, because they determine which tokens are trained on. Does nothing if the batch has no
        ``old_log_probs`` yet, or no token is left; nor in bypass mode, which computes neither number.

        Raises:
            RolloutError: the probabilities differ by more than ``trainer.max_rollout_actor_probs_diff``.
        """
        columns, bypasses = batch.batch, self.typed_config.algorithm.rollout_correction.bypass_mode
        if bypasses or "old_log_probs" not in columns.keys() or not columns["response_mask"].any():
            return
        with context.stage("policy_metrics"):
            actor = self.typed_config.actor_rollout_ref.actor
            context.metrics |= stages.mean_entropy(batch, actor.loss_agg_mode, actor.loss_scale_factor)
            self.entropy_ctrl.update(stages.entropy_per_token(batch))
            context.metrics |= compute_rollout_gap_metrics(batch)
            stages.check_rollout_gap(context.metrics, self.typed_config.trainer.max_rollout_actor_probs_diff)

    def correction(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute rollout_is_weights and accepted_mask from the difference between rollout and trainer."""
        with context.stage("rollout_correction"):
            columns, metrics = stages.correct_rollout(batch, self.typed_config.algorithm.rollout_correction)
            context.metrics |= metrics
            return columns

    def reference(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute ref_log_prob under the frozen reference policy."""
        with context.stage("ref"):
            # With adapters, the reference is the actor without them.
            in_actor = self.typed_config.actor_rollout_ref.model.has_adapters
            workers = self.policy_workers if in_actor else self.reference_workers
            assert workers is not None
            return self._by_row(workers, "compute_ref_log_prob", batch)

    def values(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute values of the critic before its update."""
        with context.stage("values"):
            return self._by_row(self.critic_workers, "compute_values", batch)

    def teacher(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute what the teachers make of the responses: teacher_logprobs, and what else the loss reads.

        A policy that teaches itself reads prompts of its own as the teacher, which are returned too.
        """
        assert self.teachers is not None
        workers = self.teacher_workers if self.privileged is None else self.policy_workers
        prompts, metrics = (DataProto(), {}) if self.privileged is None else self.privileged.columns(batch)
        context.metrics |= metrics
        if teachers_share_actor_ranks(
            self.typed_config
        ):  # the policy's workers compute with their teachers in the update
            return prompts | self.teachers.columns(batch, None)
        with context.stage("teacher"):
            return prompts | self.teachers.columns(batch | prompts, workers)

    def _by_row(self, workers: WorkerGroup, method: str, batch: DataProto) -> DataProto:
        """Call a method of the workers whose result has a row for each row of the batch."""
        is_critic = workers is self.critic_workers
        section = self.typed_config.critic if is_critic else self.typed_config.actor_rollout_ref.actor
        balance, shares = self.typed_config.trainer.balance_batch, section.use_prefix_grouper
        return wait_for(stages.call_by_row(workers, method, batch, balance=balance, shares_prompts=shares))

    def advantages(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Compute token_level_rewards (scores minus any KL penalty), advantages and returns."""
        with context.stage("adv"):
            algorithm = self.typed_config.algorithm
            if self.kl_ctrl_in_reward is not None:
                batch, metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
                context.metrics |= metrics
            else:
                rewards = batch.batch["token_level_scores"]
                batch = replace_columns(batch, DataProto.from_dict(tensors={"token_level_rewards": rewards}))
            if self.role_baselines is not None:
                batch, metrics = stages.with_role_baselines(batch, self.role_baselines)
                context.metrics |= metrics
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.typed_config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
            return batch.select(batch_keys=["token_level_rewards", "advantages", "returns"], non_tensor_batch_keys=[])

    def select_training_rows(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """Select the rows and tokens of the update: resample trajectories with PF-PPO, then mask rejected tokens.

        Called after the advantages and masking last, because scores of rejected tokens count for both.
        """
        algorithm = self.typed_config.algorithm
        if algorithm.use_pf_ppo:
            seed = stages.step_seed(self.typed_config.trainer.seed, context.number)
            settings = algorithm.pf_ppo.to_dict()
            batch = resampled(batch, lambda rows: compute_pf_ppo_reweight_data(rows, **settings, seed=seed))
        return stages.without_rejected(batch)

    def update_critic(self, batch: DataProto, context: PPOStepContext) -> DataProto | DataProtoFuture:
        """Train the critic on the returns.

        Returns:
            an empty batch. Workers that register ``update_critic`` with ``blocking=False`` still compute: then its
            future, which puts the metrics into ``context`` when it is waited for.
        """
        critic = self.typed_config.critic
        sizes = self._mini_batch_sizes(batch, critic.ppo_mini_batch_size)
        weights = stages.aggregation_columns(batch, critic.loss_agg_mode, sizes)
        batch = batch | DataProto.from_dict(tensors=weights)
        columns = (*ACTOR_COLUMNS, "values", "returns", *weights)
        parts, shares = self.critic_workers.num_parts("update_critic"), critic.use_prefix_grouper
        dealt = self._deal(batch, parts, columns, sizes, shares)
        updated = self.critic_workers.update_critic(dealt.rows, **self._own_sizes(batch, dealt))
        repeated = stages.repeated_prompts(batch, sizes) if shares else ()
        return self._record_update("update_critic", batch, dealt, updated, critic.ppo_epochs, context, repeated)

    def update_actor(
        self, batch: DataProto, context: PPOStepContext, own_forward: bool = False
    ) -> DataProto | DataProtoFuture:
        """Train the policy on the advantages; a batch or its future, as :meth:`update_critic`.

        With ``own_forward``, ``old_log_probs`` come from the update's own forward pass, and the returned batch has
        the columns old_log_probs and entropys; in a step whose tokens are written also what the loss saw of each token
        (update_log_probs, update_clipped). Otherwise it is empty.
        """
        actor = self.typed_config.actor_rollout_ref.actor
        sizes = self._mini_batch_sizes(batch, actor.ppo_mini_batch_size)
        seed = stages.step_seed(self.typed_config.trainer.seed, context.number)
        batch = batch | stages.prepare_mini_batches(batch, actor, sizes, seed)
        columns = stages.policy_columns(batch, actor, own_forward, self.typed_config.distillation)
        parts, shares = self.policy_workers.num_parts("update_actor"), actor.use_prefix_grouper
        dealt = self._deal(batch, parts, columns, sizes, shares)
        # Only what differs from the configuration: the method of a user's own worker may take the rows alone.
        arguments = self._own_sizes(batch, dealt) | ({"own_forward": True} if own_forward else {})
        if self.entropy_ctrl.value != actor.entropy_coeff:
            arguments["entropy_coeff"] = self.entropy_ctrl.value
        # The rows that PF-PPO drew are not those of the batch that is written.
        if self.token_dump.is_due(context.number) and not self.typed_config.algorithm.use_pf_ppo:
            arguments["record_tokens"] = True
        updated = self.policy_workers.update_actor(dealt.rows, **arguments)
        repeated = stages.repeated_prompts(batch, sizes) if shares else ()
        return self._record_update("update_actor", batch, dealt, updated, actor.ppo_epochs, context, repeated)

    def _mini_batch_sizes(self, batch: DataProto, prompts: int) -> list[int]:
        """Rows of each mini-batch of ``prompts`` prompts, all of whose trajectories it has; at least one mini-batch."""
        count = len(Trajectories.from_batch(batch)) // (prompts * self.typed_config.actor_rollout_ref.rollout.n)
        return mini_batch_sizes(batch, max(1, count))

    def _deal(
        self, batch: DataProto, num_parts: int, columns: Sequence[str], sizes: Sequence[int], shares: bool
    ) -> DealtBatch:
        balance, pads = self.typed_config.trainer.balance_batch, Trajectories.from_batch(batch).are_split
        return deal(batch, num_parts, balance=balance, columns=columns, sizes=sizes, pads=pads, shares_prompts=shares)

    def _own_sizes(self, batch: DataProto, dealt: DealtBatch) -> dict[str, object]:
        """Arguments of an update whose mini-batches are not those of the configuration."""
        return {"mini_batch_sizes": dealt.sizes} if Trajectories.from_batch(batch).are_split else {}

    def _record_update(
        self,
        name: str,
        batch: DataProto,
        dealt: DealtBatch,
        updated: DataProto | DataProtoFuture,
        epochs: int,
        context: PPOStepContext,
        repeated: Sequence[int] = (),
    ) -> DataProto | DataProtoFuture:
        """Record an update's metrics, FLOPs and non-finite values; return its columns in the order of the batch.

        Of an update that is still computed, the result is a future, and all this happens when it is waited for.
        ``repeated`` are the lengths of prompts that were not computed, because an earlier row has the same one.
        """
        if isinstance(updated, DataProtoFuture):
            take = functools.partial(self._record_update, name, batch, dealt)
            return updated.then(lambda ready: wait_for(take(ready, epochs, context, repeated)))
        epoch_flops = self.arithmetic[name].training_flops(*stages.token_counts(batch), repeated)
        context.flops[name] = None if epoch_flops is None else epochs * epoch_flops
        metrics = dealt.metrics | updated.meta_info["metrics"]
        self.pass_limits.take_splits(name, metrics)
        context.metrics |= metrics
        if name == "update_actor":
            self._keep_expert_counts(updated, context)
        problems = dealt.problems(updated.meta_info.get("non_finite", []))
        self.bad_steps.record(context.number, name, metrics, batch, problems)
        return dealt.restore(updated.select(meta_info_keys=[]))

    def dump_numbers(self, batch: DataProto, context: PPOStepContext) -> None:
        """Write numbers of the samples of the step, and every ``trainer.rollout_token_dump_freq`` steps its tokens."""
        if self.dump.folder is not None:
            with context.stage("dump_numbers"):
                self.dump.write_numbers(context.number, batch)
                self.token_dump.write(context.number, batch)

    def _notify_dataset(self, batch: DataProto, rewards: RewardRecord) -> None:
        """Pass all scored responses to a curriculum sampler, and the batch to a data set's ``on_batch_end``."""
        if isinstance(self.train_sampler, AbstractCurriculumSampler):
            for seen in rewards.batches if self.typed_config.algorithm.filter_groups.enable else [batch]:
                self.train_sampler.update(batch=seen)
        if hasattr(self.train_dataset, "on_batch_end"):
            self.train_dataset.on_batch_end(batch=batch)

    # ---- metrics and validation ----------------------------------------------------------------

    def step_metrics(self, batch: DataProto, context: PPOStepContext) -> Metrics:
        """See :meth:`TrainingLoop.step_metrics`."""
        seconds = context.seconds
        metrics = {
            "training/global_step": context.number,
            "training/epoch": self.epochs.epoch,
            **compute_data_metrics(batch, use_critic=self.needs.critic),
            **compute_timing_metrics(batch, seconds, generated=context.generated_tokens),
            **compute_throughout_metrics(batch, seconds, n_gpus=self.resource_pool_manager.get_n_gpus()),
            **compute_mfu_metrics(context.flops, self.arithmetic, seconds),
            **self.bad_steps.metrics(),
            **self.response_source.metrics(),
            **(self.judge.metrics() if self.judge else {}),
        }
        failed_dumps = self.dump.failed + self.token_dump.failed
        failed_dumps += self.validator.dump.failed + self.validator.token_dump.failed if self.validator else 0
        return metrics | ({"recovery/failed_dumps": float(failed_dumps)} if failed_dumps else {})

    @property
    def validates(self) -> bool:
        """See :meth:`TrainingLoop.validates`."""
        return self.validator is not None

    def _before_first_step(self, tracking: Tracking) -> None:
        self.validation_generations_logger = ValidationGenerationsLogger(tracking=tracking)
        if self.validates and self.typed_config.trainer.val_before_train:
            status("validating before the first step")
            with self.new_context().stage("testing"):
                tracking.log(self._validate(), step=self.global_steps)

    def _is_over(self) -> bool:
        return self.typed_config.trainer.val_only or super()._is_over()

    def _validate(self) -> Metrics:
        """Compute ``val-core/...`` and ``val-aux/...`` of the held-out prompts."""
        assert self.validator is not None, "validation needs val_dataset and val_reward_fn"
        # A resumed run may validate once more. Neither later steps nor later validations may depend on that.
        before = rng_state()
        metrics: Metrics | None = None
        while metrics is None:
            self.validation_order.manual_seed(self.typed_config.trainer.seed)
            try:
                with self.experience.rest():
                    metrics = self.validator.run(self.global_steps)
            except ProcessLostError as error:
                self.experience.replace_lost(error)
        set_rng_state(before)
        inputs, outputs, scores = ([s[name] for s in self.validator.samples] for name in ("input", "output", "score"))
        self._log_validation_samples(inputs, outputs, scores)
        tracking = self.validation_generations_logger and self.validation_generations_logger.tracking
        if self.validator.shown_tokens and tracking and tracking.takes_pages:
            tracking.log_page("val/tokens", self.validator.tokens_page(self.global_steps), self.global_steps)
        return metrics

    def _log_validation_samples(self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]) -> None:
        """Show the first ``trainer.log_val_generations`` validation samples in the trackers."""
        shown = list(zip(inputs, outputs, scores, strict=True))[: self.typed_config.trainer.log_val_generations]
        if shown and self.validation_generations_logger is not None:
            self.validation_generations_logger.log(self.typed_config.trainer.logger, shown, self.global_steps)

    def _score(self, batch: DataProto, reward_fn: object) -> Scored:
        """As :func:`verl.trainer.ppo.reward.compute_reward`, with the judge of the run awake."""
        return self.scorer.submit(batch, reward_fn, self.global_steps).result()


PPOTrainer.default = PPOTrainer
