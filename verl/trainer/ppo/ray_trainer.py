"""The driver of PPO and its relatives: what happens in which order.

::

    dataloader ──► prompts          input_ids, attention_mask, position_ids, raw_prompt, uid
       │ repeat(n)
       ▼
    rollout    ──► responses        prompts, responses, response_mask, rollout_log_probs
       ▼
    reward     ──► scores           token_level_scores               (reward.py, reward_manager/)
       │ with dynamic sampling: back to the dataloader, until the batch is full of prompts that can teach
       ▼
    actor      ──► old_log_probs    old_log_probs, entropys          or the rollout's, in bypass mode; or
       │                                                             the update's own (old_log_probs.py)
    driver     ──► correction       rollout_is_weights, accepted_mask                if it is on
    reference  ──► ref_log_prob     ref_log_prob                     if a KL term is on
    critic     ──► values           values                           if the estimator reads it
       ▼
    driver     ──► advantages       token_level_rewards, advantages, returns        (core_algos/)
       │ without what the correction rejected; with PF-PPO, drawn anew by score
       ▼
    critic.update, actor.update ──► metrics; the next rollout wakes with the new weights

A stage returns only its new columns; the driver alone unions them. The batch stays in the order
of the data: how samples are dealt to ranks is private to each call (``role_workers.py``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.errors import DataError
from verl.protocol import DataProto, replace_columns
from verl.trainer.checkpoint import CheckpointPlan, TrainerCheckpoint
from verl.trainer.config import PPOConfig
from verl.trainer.config.load import load_config
from verl.trainer.config.sizes import derived_sizes
from verl.trainer.loop import Metrics, TrainingLoop
from verl.trainer.ppo import stages
from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data, get_entropy_controller, get_kl_controller
from verl.trainer.ppo.dynamic_sampling import Draw, fill_batch
from verl.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_mfu_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.old_log_probs import OldLogProbs
from verl.trainer.ppo.records import RecordFolder
from verl.trainer.ppo.reward import RewardRecord, compute_reward, leave_out_failed, start_reward
from verl.trainer.ppo.role_workers import RoleWorkers, compute_columns, update_weights
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode
from verl.trainer.ppo.stages import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.utils import Needs, Role, need_critic, need_reference_policy, need_reward_model
from verl.trainer.ppo.validation import Validator, generation_records
from verl.trainer.schedule import Schedule
from verl.trainer.timing import Stopwatch, stage
from verl.utils.checkpoint import rng_state, set_rng_state
from verl.utils.console import Progress
from verl.utils.dataset.loading import ending_with_driver
from verl.utils.dataset.sampler import AbstractCurriculumSampler
from verl.utils.flops_counter import Arithmetic
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

logger = logging.getLogger(__name__)

__all__ = [
    "RayPPOTrainer",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
]


class RayPPOTrainer(TrainingLoop):
    """Trains a policy by reinforcement learning; every number is computed by workers or pure functions.

    Args:
        config: the whole configuration (a composed Hydra config is accepted and typed here).
        tokenizer: tokenizer of the policy.
        role_worker_mapping: worker class of each role.
        resource_pool_manager: which pool of processes each role lives in.
        ray_worker_group_cls: the controller, RayWorkerGroup or LocalWorkerGroup.
        processor: multi-modal processor, if any.
        reward_fn: reward manager for training.
        val_reward_fn: reward manager for validation; without it there is no validation.
        train_dataset, val_dataset: map-style datasets of prompts.
        collate_fn: rows to columns.
        train_sampler: order of the training prompts.
        device_name: ``cuda`` or ``cpu``.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: Any,
        ray_worker_group_cls: type,
        processor: Any = None,
        reward_fn: Callable | None = None,
        val_reward_fn: Callable | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        config = config if isinstance(config, PPOConfig) else load_config(config)
        super().__init__(config.trainer)
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.role_workers = RoleWorkers(
            worker_classes=role_worker_mapping,
            pools=resource_pool_manager,
            group_class=ray_worker_group_cls,
            device_name=device_name,
        )
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.needs = Needs.of(self.config)
        self.kl_ctrl = (
            get_kl_controller(self.config.algorithm.kl_ctrl) if self.config.algorithm.use_kl_in_reward else None
        )
        self.entropy_ctrl = get_entropy_controller(self.config.actor_rollout_ref.actor)
        self.controllers |= {"entropy_ctrl": self.entropy_ctrl} | ({"kl_ctrl": self.kl_ctrl} if self.kl_ctrl else {})
        self.metrics: Metrics = {}
        self.flops: dict[str, float | None] = {}
        self.record = RewardRecord()
        self.dump = RecordFolder(self.config.trainer.rollout_data_dir)
        self.train_sampler = train_sampler
        self.checkpoint = TrainerCheckpoint(CheckpointPlan.of_ppo(self.config.trainer), {})
        self._validated_before = False
        self._create_dataloaders(train_dataset, val_dataset, collate_fn, train_sampler)

    # ---- set-up -------------------------------------------------------------------------------

    def _create_dataloaders(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, sampler: Any) -> None:
        data = self.config.data
        common: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": min(data.dataloader_num_workers, os.cpu_count() or 1),
            "worker_init_fn": ending_with_driver(),
        }
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        key = "gen_batch_size" if data.gen_batch_size else "train_batch_size"
        self.train_dataloader = StatefulDataLoader(
            train_dataset, batch_size=data[key], sampler=sampler, drop_last=True, generator=self.own_draws(), **common
        )
        if len(self.train_dataloader) == 0:
            raise DataError(
                f"the training data has {len(train_dataset)} prompts (after filters), fewer than one batch of "
                f"data.{key}={data[key]}. Give more data, or lower data.{key}."
            )
        self.total_training_steps = derived_sizes(self.config, len(train_dataset)).total_steps
        self.schedule = Schedule.of(self.config.trainer, self.total_training_steps)
        self.val_dataloader = None
        self.validation_order = self.own_draws()
        if val_dataset is not None:
            self.val_dataloader = StatefulDataLoader(
                val_dataset,
                batch_size=data.val_batch_size or len(val_dataset),
                shuffle=data.validation_shuffle,
                generator=self.validation_order,
                **common,
            )

    def init_workers(self) -> None:
        """Start every worker of the run and load its model."""
        self.recovery.protect(lambda: None if self.role_workers.groups else self.start_workers())

    def start_workers(self) -> None:
        """See :meth:`TrainingLoop.start_workers`."""
        self.role_workers.start(self.config, self.needs, self.total_training_steps)
        groups = self.role_workers.groups
        self.pass_limits.tell(groups.values())
        self.actor_rollout_wg: Any = groups[Role.ActorRollout]
        self.critic_wg: Any = groups.get(Role.Critic)
        self.ref_policy_wg: Any = groups.get(Role.RefPolicy)
        self.rm_wg: Any = groups.get(Role.RewardModel)
        self.old_log_probs_plan = OldLogProbs.of(self.config, self.actor_rollout_wg.training_randomness()[0])
        logger.info("%s", self.old_log_probs_plan)
        actor = Arithmetic.of_ranks(self.actor_rollout_wg.arithmetic())
        self.arithmetic = {"old_log_prob": actor, "update_actor": actor}
        if self.critic_wg:
            self.arithmetic["update_critic"] = Arithmetic.of_ranks(self.critic_wg.arithmetic())
        self.checkpoint.workers_replaced(self.trained_groups)
        self.validator = None
        if self.val_dataloader is not None and self.val_reward_fn is not None:
            self.validator = Validator(
                self.config, self.tokenizer, self.actor_rollout_wg, self._score, self.val_reward_fn, self.val_dataloader
            )

    @property
    def trained_groups(self) -> dict[str, Any]:
        """See :meth:`TrainingLoop.trained_groups`."""
        return {"actor": self.actor_rollout_wg} | ({"critic": self.critic_wg} if self.critic_wg else {})

    def end_workers(self) -> None:
        """See :meth:`TrainingLoop.end_workers`."""
        self.role_workers.end()

    def shutdown(self) -> None:
        """End the workers of a run that is over; nothing of it can be used afterwards."""
        self.end_workers()

    # ---- the loop -----------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step: resume, validate, step, save, log."""
        self._train(self.config.trainer, self.config.to_dict())

    def _to_the_last_step(self, tracking: Tracking, progress: Progress) -> None:
        trainer = self.config.trainer
        self._track_generations = ValidationGenerationsLogger(tracking).log
        if self.validator and trainer.val_before_train and not self._validated_before:
            tracking.log(self._validate(), step=self.global_steps)
            self._validated_before = True
        if not trainer.val_only:
            super()._to_the_last_step(tracking, progress)

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        """A step, and what the schedule asks for after it: validation, a checkpoint."""
        self.metrics, self.flops, self.stopwatch, self.record = {}, {}, Stopwatch(), RewardRecord()
        with self.stopwatch("step"):
            batch = self.step(DataProto.from_single_dict(dict(rows)))
            self._tell_the_data(batch)
            if self.validator and self.schedule.due("test", self.global_steps):
                self.metrics.update(self._validate())
            self._save_if_due()
        self.metrics.update(self._step_metrics(batch))
        return self.metrics

    def step(self, prompts: DataProto) -> DataProto:
        """One PPO iteration: prompts in, updated policy out. See the picture above."""
        batch = self.collect(prompts)
        if not self.own_forward:
            batch = batch | self.old_log_probs(batch)
        if self.config.reward_model.launch_reward_fn_async:
            batch = self.finish_reward(batch)
        if not self.own_forward:
            self.look_at_policy(batch)
        if self.needs.correction:
            batch = batch | self.correction(batch)
        if self.needs.reference:
            batch = batch | self.reference(batch)
        if self.needs.critic:
            batch = batch | self.values(batch)
        batch = batch | self.advantages(batch)
        chosen = self.to_learn_from(batch)
        if self.needs.critic:
            self.update_critic(chosen)
        if self.updates_actor:
            batch = batch | self.update_actor(chosen)
        if self.own_forward:
            self.look_at_policy(batch)
        return batch

    @property
    def updates_actor(self) -> bool:
        """Whether this step updates the policy: not while the critic warms up."""
        return self.global_steps > self.config.trainer.critic_warmup

    @property
    def own_forward(self) -> bool:
        """Whether this step's old_log_probs are those of the update's own forward pass."""
        return self.old_log_probs_plan.source == "update" and self.updates_actor

    def _tell_the_data(self, batch: DataProto) -> None:
        """A curriculum learns from every response that was scored, a growing data set from the batch."""
        if isinstance(self.train_sampler, AbstractCurriculumSampler):
            for seen in self.record.batches if self.config.algorithm.filter_groups.enable else [batch]:
                self.train_sampler.update(batch=seen)
        if hasattr(self.train_dataset, "on_batch_end"):
            self.train_dataset.on_batch_end(batch=batch)

    # ---- the stages ---------------------------------------------------------------------------

    def collect(self, prompts: DataProto) -> DataProto:
        """Responses and their scores; with dynamic sampling from as many prompts as it takes."""
        algorithm, n = self.config.algorithm, self.config.actor_rollout_ref.rollout.n
        if not algorithm.filter_groups.enable:
            return self.reward(self.rollout(prompts))

        def draw(number: int) -> Draw:
            rows = prompts if number == 0 else DataProto.from_single_dict(dict(next(self.rows)))
            responses = self.rollout(rows, first_row=number * len(prompts))
            scored = self.reward(responses)
            takes_part = scored.batch["response_mask"].any(-1).numpy()
            return Draw(scored, responses.non_tensor_batch["uid"], takes_part)

        batch, metrics = fill_batch(draw, algorithm.filter_groups, self.config.data.train_batch_size, n)
        self.metrics.update(metrics)
        return batch

    @stage("gen")
    def rollout(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """n responses for each prompt, and the reward of a greedy one if the estimator wants it."""
        prompts = stages.name_groups(prompts, self.global_steps, first_row)
        prompts = prompts | DataProto(meta_info={"global_steps": self.global_steps, "validate": False})
        repeated = stages.repeat_prompts(prompts, self.config.actor_rollout_ref.rollout.n)
        batch = repeated.select(batch_keys=[]) | self.actor_rollout_wg.generate_sequences(repeated)
        return batch | self._greedy_baseline(prompts) if self.needs.greedy_baseline else batch

    def _greedy_baseline(self, prompts: DataProto) -> DataProto:
        """Of the greedy response to each prompt: its score ``reward_baselines``, its ``baseline_status``."""
        greedy = stages.repeat_prompts(prompts, 1) | DataProto(meta_info={"do_sample": False})
        responses = greedy.select(batch_keys=[]) | self.actor_rollout_wg.generate_sequences(greedy)
        scores, extra = self._score(responses, self.reward_fn)
        columns = {"reward_baselines": scores.sum(-1)}
        statuses = {"baseline_status": np.array(extra["reward_status"], dtype=object)}
        baselines = DataProto.from_dict(tensors=columns, non_tensors=statuses)
        return baselines.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True)

    @stage("reward")
    def reward(self, batch: DataProto) -> DataProto:
        """token_level_scores and what else the reward function says; failed samples leave the training batch.

        With ``reward_model.launch_reward_fn_async`` scoring only begins here, and :meth:`finish_reward` ends it.
        """
        self.scoring = start_reward(self._with_model_scores(batch), self.reward_fn)
        return batch if self.config.reward_model.launch_reward_fn_async else self._scored(batch)

    @stage("reward")
    def finish_reward(self, batch: DataProto) -> DataProto:
        """Wait for the scores that :meth:`reward` asked for."""
        return self._scored(batch)

    def _scored(self, batch: DataProto) -> DataProto:
        scores, extra = self.scoring.result()
        compares = self.needs.siblings and self.config.actor_rollout_ref.rollout.n > 1
        kept, rates = leave_out_failed(
            batch, extra["reward_status"], self.config.reward_model.on_failure, needs_siblings=compares
        )
        self._dump_rollouts(batch, scores, extra)
        scored = replace_columns(batch, kept | stages.score_columns(scores, extra))
        self.record.add(scored, list(extra), rates)
        return scored

    def _score(self, batch: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list]]:
        return compute_reward(self._with_model_scores(batch), reward_fn)

    def _with_model_scores(self, batch: DataProto) -> DataProto:
        return batch | self.rm_wg.compute_rm_score(batch) if self.needs.reward_model else batch

    @stage("old_log_prob")
    def old_log_probs(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys of the policy before the update."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            return apply_bypass_mode(batch).select(batch_keys=["old_log_probs"], non_tensor_batch_keys=[])
        self.flops["old_log_prob"] = self.arithmetic["old_log_prob"].forward_flops(*stages.token_counts(batch))
        return self._compute(self.actor_rollout_wg, "compute_log_prob", batch)

    @stage("policy_metrics")
    def look_at_policy(self, batch: DataProto) -> None:
        """Its entropy, and how far the rollout engine's log-probs are from its own, on the tokens to learn from.

        Always of the policy before the update. After the scores, which say what these tokens are. In bypass mode
        nothing knows either, and where no token is left there is nothing to measure, nor to steer the entropy by.
        """
        if self.config.algorithm.rollout_correction.bypass_mode or not batch.batch["response_mask"].any():
            return
        actor = self.config.actor_rollout_ref.actor
        self.metrics.update(stages.mean_entropy(batch, actor.loss_agg_mode, actor.loss_scale_factor))
        self.entropy_ctrl.update(stages.entropy_per_token(batch))
        self.metrics.update(compute_rollout_gap_metrics(batch))
        stages.check_rollout_gap(self.metrics, self.config.trainer.max_rollout_actor_probs_diff)

    @stage("rollout_correction")
    def correction(self, batch: DataProto) -> DataProto:
        """rollout_is_weights and accepted_mask: what the gap between rollout and trainer asks for."""
        columns, metrics = stages.correct_rollout(batch, self.config.algorithm.rollout_correction)
        self.metrics.update(metrics)
        return columns

    @stage("ref")
    def reference(self, batch: DataProto) -> DataProto:
        """ref_log_prob under the frozen reference policy."""
        return self._compute(self.ref_policy_wg, "compute_ref_log_prob", batch)

    @stage("values")
    def values(self, batch: DataProto) -> DataProto:
        """values of the critic before its update."""
        return self._compute(self.critic_wg, "compute_values", batch)

    @stage("adv")
    def advantages(self, batch: DataProto) -> DataProto:
        """token_level_rewards, then advantages and returns by the chosen estimator."""
        algorithm = self.config.algorithm
        rewards = DataProto.from_dict(tensors={"token_level_rewards": batch.batch["token_level_scores"]})
        if self.kl_ctrl is not None:
            penalised, metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
            rewards = penalised.select(batch_keys=["token_level_rewards"], non_tensor_batch_keys=[])
            self.metrics.update(metrics)
        settings = {**algorithm.to_dict(), "config": algorithm}
        return rewards | compute_advantage(batch | rewards, algorithm.adv_estimator, settings)

    def to_learn_from(self, batch: DataProto) -> DataProto:
        """The rows and tokens of the update: without what was rejected, and with PF-PPO drawn by their score.

        After the advantages, because a rejected token still tells what its response was worth; after the draw too.
        """
        algorithm = self.config.algorithm
        if algorithm.use_pf_ppo:
            seed = stages.step_seed(self.config.trainer.seed, self.global_steps)
            batch = compute_pf_ppo_reweight_data(batch, **algorithm.pf_ppo.to_dict(), seed=seed)
        return stages.without_rejected(batch)

    @stage("update_critic")
    def update_critic(self, batch: DataProto) -> None:
        """Fit the critic to the returns."""
        critic = self.config.critic
        count = self._mini_batches(critic.ppo_mini_batch_size)
        weights = stages.aggregation_columns(batch, critic.loss_agg_mode, count)
        columns = (*stages.ACTOR_COLUMNS, "values", "returns", *weights)
        batch = batch | DataProto.from_dict(tensors=weights)
        self._count_update("update_critic", batch, critic.ppo_epochs)
        self._update(self.critic_wg, "update_critic", batch, columns, count)

    @stage("update_actor")
    def update_actor(self, batch: DataProto) -> DataProto:
        """Improve the policy by its advantages; old_log_probs and entropys, where the update's own pass gives them."""
        actor = self.config.actor_rollout_ref.actor
        seed = stages.step_seed(self.config.trainer.seed, self.global_steps)
        count = self._mini_batches(actor.ppo_mini_batch_size)
        batch = batch | stages.prepare_mini_batches(batch, actor, count, seed)
        self._count_update("update_actor", batch, actor.ppo_epochs)
        columns = stages.policy_columns(batch, actor, self.own_forward)
        arguments: dict[str, Any] = {"entropy_coeff": self.entropy_ctrl.value}
        arguments |= {"own_forward": True} if self.own_forward else {}
        return self._update(self.actor_rollout_wg, "update_actor", batch, columns, count, **arguments)

    # ---- calling workers ----------------------------------------------------------------------

    def _compute(self, workers: Any, method: str, batch: DataProto) -> DataProto:
        """Columns that a worker group makes of the sequences."""
        lengths, balance = stages.sequence_lengths(batch), self.config.trainer.balance_batch
        return compute_columns(workers, method, batch, stages.ACTOR_COLUMNS, lengths, balance)

    def _update(
        self, workers: Any, method: str, batch: DataProto, columns: tuple[str, ...], count: int, **arguments: Any
    ) -> DataProto:
        """``count`` optimizer steps, one for each mini-batch; the columns that they make, if any."""
        lengths, balance = stages.sequence_lengths(batch), self.config.trainer.balance_batch
        metrics, made, problems = update_weights(workers, method, batch, columns, lengths, balance, count, **arguments)
        self.pass_limits.see(method, metrics)
        self.metrics.update(metrics)
        self.bad_steps.see(self.global_steps, method, metrics, batch, problems)
        return made

    def _count_update(self, name: str, batch: DataProto, epochs: int) -> None:
        """File the useful arithmetic of an update, which goes ``epochs`` times over the batch."""
        once = self.arithmetic[name].training_flops(*stages.token_counts(batch))
        self.flops[name] = None if once is None else epochs * once

    def _mini_batches(self, prompts: int) -> int:
        """Optimizer steps of one pass, with so many prompts in each."""
        return self.config.data.train_batch_size // prompts

    # ---- reports and checkpoints --------------------------------------------------------------

    def _step_metrics(self, batch: DataProto) -> Metrics:
        timing = self.stopwatch.seconds
        world_size = self.actor_rollout_wg.world_size
        return {
            "training/global_step": self.global_steps,
            "training/epoch": self.epochs.epoch,
            **compute_data_metrics(batch, use_critic=self.needs.critic),
            **self.record.metrics(),
            **compute_timing_metrics(batch, timing, generated=self.record.generated_tokens()),
            **compute_throughout_metrics(batch, timing, n_gpus=world_size),
            **compute_mfu_metrics(self.flops, self.arithmetic, timing),
            **self.bad_steps.metrics(),
            **self._dump_metrics(),
        }

    def _dump_metrics(self) -> Metrics:
        """``recovery/failed_dumps``: files with samples that the disk did not take, once there are any."""
        failed = self.dump.failed + (self.validator.dump.failed if self.validator else 0)
        return {"recovery/failed_dumps": float(failed)} if failed else {}

    @stage("testing")
    def _validate(self) -> Metrics:
        """Metrics ``val-core/...`` and ``val-aux/...`` of the held-out prompts."""
        assert self.validator is not None, "validation needs val_dataset and val_reward_fn"
        # The steps after it, and the validations, are the same with one validation more, as a resumed run has.
        before = rng_state()
        self.validation_order.manual_seed(self.config.trainer.seed)
        metrics = self.validator.run(self.global_steps)
        set_rng_state(before)
        shown = self.validator.samples[: self.config.trainer.log_val_generations]
        if shown:
            self._track_generations([(s["input"], s["output"], s["score"]) for s in shown], self.global_steps)
        return metrics

    @stage("dump_rollout_generations")
    def _dump_rollouts(self, batch: DataProto, scores: torch.Tensor, extra: dict[str, list]) -> None:
        if self.dump.folder is not None:
            records = generation_records(self.global_steps, self.tokenizer, batch, scores, extra)
            self.dump.write(self.global_steps, records, append=bool(self.record.batches))
