"""The parts of a training step under the names by which subclasses of ``RayPPOTrainer`` write their own ``fit``.

::

    for rows in self.train_dataloader:
        batch = DataProto.from_single_dict(rows)
        prompts = self._get_gen_batch(batch).repeat(n, interleave=True)
        batch = batch.repeat(n, interleave=True).union(self.actor_rollout_wg.generate_sequences(prompts))
        scores, extra = compute_reward(batch, self.reward_fn)
        batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        ...
        self.actor_rollout_wg.update_actor(batch)

Each part does what the stage of that name does in verl's own step, which calls the same stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from verl.base.redact import secrets_in
from verl.compat.own_fit.ordered_group import OrderedGroup
from verl.config import ActorConfig, CriticConfig
from verl.errors import ConfigError
from verl.experience.prompts import name_samples
from verl.experience.records import RecordFolder, generation_records
from verl.protocol import DataProto, DataProtoFuture
from verl.trainer.balance import deal
from verl.trainer.config.load import as_composed
from verl.trainer.loop import TrainingLoop
from verl.trainer.ppo.metric_utils import compute_mfu_metrics
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.metric import Metrics

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup
    from verl.trainer.ppo.trainer import PPOStepContext


class WeightsOnDemand:
    """Stands where public programs tell engines to take weights or to sleep, which these do by themselves."""

    def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing: the next generation begins with the trained weights."""

    def sleep_replicas(self) -> None:
        """Do nothing: an engine frees its memory after it generated, as ``rollout.free_cache_engine`` says."""

    def wake_up_replicas(self) -> None:
        """Do nothing: an engine wakes when it generates."""


PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


class RayPPOTrainer(PPOTrainer):
    """The trainer under its public name, with the attributes and methods that a ``fit`` of a subclass uses.

    A subclass may replace :meth:`step`, a stage of it, or all of ``fit``. It is made as
    :class:`verl.trainer.ppo.trainer.PPOTrainer` is.
    """

    hybrid_engine: bool = True
    """Actor and rollout engine share processes."""
    max_steps_duration: float = 0.0
    """Seconds of the longest step, for a ``fit`` that keeps count of it."""
    _sampled: tuple[int, int] = (0, 0)
    """The last step in which :meth:`_generate_sequences` sampled, and how many prompts."""

    # ---- what the run has -----------------------------------------------------------------------

    @functools.cached_property
    def config(self) -> DictConfig:
        """The configuration as Hydra composes it, also with keys that nothing here reads.

        It belongs to the code of the subclass: the run itself has :attr:`typed_config`, of the same values.
        """
        return as_composed(self.typed_config)

    @property
    def use_critic(self) -> bool:
        """Whether there is a critic, :attr:`critic_wg`."""
        return self.needs.critic

    @property
    def use_reference_policy(self) -> bool:
        """Whether there is a reference policy, :attr:`ref_policy_wg` or the actor's workers (:attr:`ref_in_actor`)."""
        return self.needs.reference

    @property
    def ref_in_actor(self) -> bool:
        """Whether the reference policy is the actor without its LoRA adapters, and :attr:`ref_policy_wg` is None."""
        return self.typed_config.actor_rollout_ref.model.has_adapters

    @property
    def use_rm(self) -> bool:
        """Whether there is a reward model, :attr:`rm_wg`."""
        return self.needs.reward_model

    @property
    def async_rollout_mode(self) -> bool:
        """Whether ``rollout.mode`` is ``async``; both modes generate by the same call."""
        return self.typed_config.actor_rollout_ref.rollout.mode == "async"

    # ---- worker groups --------------------------------------------------------------------------

    @property
    def actor_rollout_wg(self) -> Any:
        """Workers of policy and rollout: ``generate_sequences``, ``compute_log_prob``, ``update_actor``."""
        # Bound to this class: a subclass may override a part and call the worker group in it.
        return self._ordered(
            "policy",
            self.policy_workers,
            self.typed_config.actor_rollout_ref.actor,
            generate_sequences=functools.partial(RayPPOTrainer._generate_sequences, self),
            update_actor=functools.partial(RayPPOTrainer._update_actor, self),
        )

    @actor_rollout_wg.setter
    def actor_rollout_wg(self, group: WorkerGroup | None) -> None:
        self.policy_workers = group

    @property
    def checkpoint_manager(self) -> WeightsOnDemand:
        """What moves weights to rollout engines elsewhere; here engines take new weights when they generate."""
        return WeightsOnDemand()

    @property
    def async_rollout_manager(self) -> Any:
        """The workers of policy and rollout, for ``generate_sequences``."""
        return self.actor_rollout_wg

    @property
    def ref_policy_wg(self) -> Any:
        """Workers of the reference policy: ``compute_ref_log_prob``; None without one."""
        return self._ordered("reference", self.reference_workers, self.typed_config.actor_rollout_ref.actor)

    @ref_policy_wg.setter
    def ref_policy_wg(self, group: WorkerGroup | None) -> None:
        self.reference_workers = group

    @property
    def critic_wg(self) -> Any:
        """Workers of the critic: ``compute_values``, ``update_critic``; None without one."""
        update = functools.partial(RayPPOTrainer._update_critic, self)
        return self._ordered("critic", self.critic_workers, self.typed_config.critic, update_critic=update)

    @critic_wg.setter
    def critic_wg(self, group: WorkerGroup | None) -> None:
        self.critic_workers = group

    @property
    def rm_wg(self) -> Any:
        """Workers of the reward model: ``compute_rm_score``; None without one."""
        return self.reward_workers

    @rm_wg.setter
    def rm_wg(self, group: WorkerGroup | None) -> None:
        self.reward_workers = group

    @functools.cached_property
    def _ordered_groups(self) -> dict[str, OrderedGroup]:
        """Kept, because a program may set attributes of them."""
        return {}

    def _ordered(
        self,
        role: str,
        group: WorkerGroup | None,
        section: ActorConfig | CriticConfig,
        **calls: Callable[[DataProto], object],
    ) -> OrderedGroup | None:
        if group is None:
            return None
        ordered = self._ordered_groups.get(role)
        if ordered is None or ordered.group is not group:
            balance, shares = self.typed_config.trainer.balance_batch, section.use_prefix_grouper
            ordered = self._ordered_groups[role] = OrderedGroup(group, balance, calls, shares)
        return ordered

    @property
    def has_workers(self) -> bool:
        """Whether the workers run, also those that an ``init_workers`` of a subclass has started by itself."""
        return self.policy_workers is not None or super().has_workers

    def resume(self) -> None:
        """See :meth:`TrainingLoop.resume`; begins to use workers that ``init_workers`` of a subclass has started."""
        if not self.checkpoint.groups:
            self._use_workers()
        super().resume()

    def restart_workers(self) -> None:
        """See :meth:`TrainingLoop.restart_workers`.

        Raises:
            ConfigError: an ``init_workers`` of a subclass has started the workers, which cannot be repeated.
        """
        if self.has_workers and not self.worker_groups.groups and self._started_by_subclass:
            raise ConfigError(
                f"the workers that {type(self).__name__}.init_workers started are lost, and only workers of "
                "start_workers can be restarted: override start_workers or worker_arguments instead, or start the "
                "run again; it resumes from its last checkpoint."
            )
        super().restart_workers()

    @property
    def _started_by_subclass(self) -> bool:
        return type(self).init_workers is not TrainingLoop.init_workers

    # ---- rollout --------------------------------------------------------------------------------

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Take the prompts' tokens out of ``batch``, in place, and return the batch to generate from.

        It shares the other columns with ``batch``, which the responses are united with afterwards.
        """
        prompts = batch.pop(batch_keys=[name for name in PROMPT_COLUMNS if name in batch.batch.keys()])
        prompts.non_tensor_batch = dict(batch.non_tensor_batch)
        prompts.meta_info = dict(batch.meta_info)
        return prompts

    def _generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response to each row, as verl's own step numbers its samples, so that it draws the same.

        Args:
            prompts: repeated for each response. ``meta_info`` may have ``do_sample`` and ``validate``.

        Returns:
            columns of :mod:`verl.workers.rollout.columns`; ``meta_info["timing"]`` is there, and empty, because the
            caller's timer measures the call.

        Raises:
            ConfigError: an agent loop returned several sequences, ``trainer.async.lag`` is set, or the rollout engines
                have a pool (``hybrid_engine=false``).
        """
        if lag := self.typed_config.trainer.async_.lag:
            raise ConfigError(
                f"trainer.async.lag={lag} samples ahead in verl's own step, and a fit of your own samples when it says "
                "so. Set trainer.async.lag=0, or build on step()."
            )
        if not self.typed_config.actor_rollout_ref.hybrid_engine:
            raise ConfigError(
                "actor_rollout_ref.hybrid_engine=false: verl's own step sends weights to rollout engines with a pool, "
                "and a fit of your own samples when it says so. Set hybrid_engine=true, or build on step()."
            )
        if "sample_index" not in prompts.non_tensor_batch:
            step, drawn = self._sampled
            drawn = drawn if step == self.global_steps else 0
            n = self.typed_config.actor_rollout_ref.rollout.n
            prompts = name_samples(prompts, self.global_steps, n, drawn)
            if prompts.meta_info.get("do_sample", True) and not prompts.meta_info.get("validate", False):
                self._sampled = self.global_steps, drawn + len(set(prompts.non_tensor_batch["uid"]))
        prompts = prompts.select()
        prompts.meta_info = {"validate": False, **prompts.meta_info, "global_steps": self.global_steps}
        made = self.response_source.answer(prompts)
        if len(made) == len(prompts) and self.scores_responses:
            manager = self.val_reward_fn if prompts.meta_info["validate"] else self.reward_fn
            made |= self._reward_columns(prompts.select(batch_keys=[]) | made, manager)
        if len(made) != len(prompts):
            raise ConfigError(
                f"the agent loops returned {len(made)} training sequences for {len(prompts)} prompts, but your own "
                "fit joins them row by row. Return one AgentLoopOutput from run(), or build your fit on step()."
            )
        return made | DataProto(meta_info={"timing": {}})

    def _reward_columns(self, batch: DataProto, reward_fn: object) -> DataProto:
        """Score responses: ``rm_scores``, and further values as ``meta_info["reward_extra_keys"]`` names them."""
        scores, extra = self._score(batch, reward_fn)
        columns = {name: np.array(values, dtype=object) for name, values in extra.items()}
        return DataProto.from_dict({"rm_scores": scores}, columns, {"reward_extra_keys": list(columns)})

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        """Score responses that have no ``rm_scores``; see :func:`verl.trainer.ppo.reward.extract_reward`."""
        return self._reward_columns(batch, self.reward_fn)

    def _balance_batch(
        self, batch: DataProto, metrics: Metrics, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> None:
        """Add to ``metrics`` how evenly tokens are spread over the ranks; the rows of ``batch`` stay in their order.

        Every call of a worker group balances its rows for itself and returns them in the order of the batch. Which
        samples belong to which mini-batch therefore does not depend on the number of ranks, as ``keep_minibatch``
        asks for.
        """
        balance = self.typed_config.trainer.balance_batch
        dealt = deal(batch, self.policy_workers.num_parts("update_actor"), balance=balance, pads=True)
        metrics |= {name.replace("global_seqlen", logging_prefix, 1): value for name, value in dealt.metrics.items()}

    # ---- log-probs, values, updates ---------------------------------------------------------------

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """Return ``old_log_probs`` and ``entropys``, and the share of the device's peak that it took (0: unknown)."""
        context = self.new_context()
        columns = self.old_log_probs(batch, context)
        used = compute_mfu_metrics(context.flops, self.arithmetic, context.seconds)
        return columns, used.get("perf/mfu/actor_infer", 0.0)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` under the frozen reference."""
        return self.reference(batch, self.new_context())

    def _compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` of the critic."""
        return self.values(batch, self.new_context())

    def _update_critic(self, batch: DataProto) -> DataProto | DataProtoFuture:
        """Train the critic on the returns; the result has ``meta_info["metrics"]``.

        Of workers that register ``update_critic`` with ``blocking=False`` it is the result's future.
        """
        return self._update("update_critic", self.update_critic, batch)

    def _update_actor(self, batch: DataProto) -> DataProto | DataProtoFuture:
        """Train the policy on the advantages; the result has ``meta_info["metrics"]``.

        Of workers that register ``update_actor`` with ``blocking=False`` it is the result's future.

        Raises:
            SchemaError: a column of the update is missing.
            NonFiniteError: the updates of ``trainer.recovery.max_bad_steps`` steps in a row were not finite; of a
                future, when it is waited for.
        """
        return self._update("update_actor", self.update_actor, batch)

    def _update(
        self, name: str, update: Callable[[DataProto, PPOStepContext], DataProto | DataProtoFuture], batch: DataProto
    ) -> DataProto | DataProtoFuture:
        context = self.new_context()

        def outcome() -> DataProto:
            if name == "update_actor":
                self.bad_steps.stop_if_too_many(context.number)
            return DataProto(meta_info={"metrics": context.metrics})

        with context.stage(name):
            updated = update(batch, context)
            if not isinstance(updated, DataProtoFuture):
                return outcome()

        @functools.cache  # get() may be called twice, and the update is recorded once
        def waited_for() -> DataProto:
            with context.stage(name):
                updated.get()
                return outcome()

        return DataProtoFuture(collect_fn=lambda _: waited_for(), futures=[])

    # ---- samples --------------------------------------------------------------------------------

    def _log_rollout_data(
        self,
        batch: DataProto,
        reward_extra_infos_dict: Mapping[str, Sequence[object]],
        timing_raw: dict[str, float],
        rollout_data_dir: str,
    ) -> None:
        """Write the samples of the step, with ``token_level_scores``, to ``{rollout_data_dir}/{step}.jsonl``."""
        context = self.new_context()
        with context.stage("dump_rollout_generations"):
            extra = {name: list(values) for name, values in reward_extra_infos_dict.items()}
            scores = batch.batch["token_level_scores"]
            records = generation_records(self.global_steps, self.tokenizer, batch, scores, extra)
            RecordFolder(rollout_data_dir, secrets_in(self.typed_config.to_dict())).write(self.global_steps, records)
        timing_raw |= context.seconds

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Sequence[object],
        scores: Sequence[float],
        reward_extra_infos_dict: Mapping[str, Sequence[object]],
        dump_path: str,
    ) -> None:
        """Write samples to ``{dump_path}/{step}.jsonl``; extra values of another length are left out."""
        columns = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
        columns["step"] = [self.global_steps] * len(inputs)
        columns |= {name: v for name, v in reward_extra_infos_dict.items() if len(v) == len(inputs)}
        rows = zip(*columns.values(), strict=True)
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        RecordFolder(dump_path, secrets_in(self.typed_config.to_dict())).write(self.global_steps, records)

    def _maybe_log_val_generations(
        self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]
    ) -> None:
        """Show the first ``trainer.log_val_generations`` validation samples in the trackers."""
        super()._log_validation_samples(inputs, outputs, scores)

    def _log_validation_samples(self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]) -> None:
        self._maybe_log_val_generations(inputs, outputs, scores)  # a subclass may replace it

    # ---- the run --------------------------------------------------------------------------------

    def _load_checkpoint(self) -> None:
        """Restore workers, data position and ``global_steps`` as ``trainer.resume_mode`` says; 0 for a new run."""
        self.resume()

    def _start_profiling(self, do_profile: bool) -> None:
        """Start the profilers of the workers, at the step that is to be profiled.

        With ``global_profiler.tool`` these are the run's own, otherwise those of workers with a ``DistProfiler``.

        Raises:
            ConfigError: no worker has a profiler.
        """
        if do_profile and self.profiles.steps:
            self.profiles.start(self.global_steps, self._groups_by_role)
            return
        for name, group in self._profiled_groups(do_profile):
            group.start_profile(role=name, profile_step=self.global_steps)

    def _stop_profiling(self, do_profile: bool) -> None:
        """Stop the profilers of the workers, which write their files."""
        if do_profile and self.profiles.steps:
            self.profiles.stop(self._groups_by_role)
            return
        for _, group in self._profiled_groups(do_profile):
            group.stop_profile()

    def _profiled_groups(self, do_profile: bool) -> list[tuple[str, WorkerGroup]]:
        if not do_profile:
            return []
        groups = self._groups_by_role
        found = [
            (name, group) for name, group in groups.items() if group is not None and hasattr(group, "start_profile")
        ]
        if not found:
            raise ConfigError(
                "no worker of this run has a profiler. Set global_profiler.tool, global_profiler.steps and "
                "actor_rollout_ref.actor.profiler.enable, derive the class of a worker from "
                "verl.utils.profiler.DistProfilerExtension too (docs/recipes.md), or start no profiling; timing_s/* is "
                "always logged."
            )
        return found


PPOTrainer.default = RayPPOTrainer  # a program that imports the class may have replaced methods of it
