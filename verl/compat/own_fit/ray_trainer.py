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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from verl.base.redact import secrets_in
from verl.compat.own_fit.agent_loops import ProgramAgentLoopManager
from verl.compat.own_fit.ordered_group import OrderedGroup
from verl.config import ActorConfig, CriticConfig
from verl.errors import ConfigError
from verl.experience.prompts import name_samples
from verl.experience.records import RecordFolder, generation_records
from verl.protocol import DataProto, DataProtoFuture
from verl.protocol.future import wait_for
from verl.trainer.balance import deal
from verl.trainer.config.load import as_composed
from verl.trainer.loop import TrainingLoop
from verl.trainer.ppo.metric_utils import compute_mfu_metrics
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.roles import Needs
from verl.utils.metric import Metrics, reduce_metrics

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from verl.experience.rewards import RewardRecord
    from verl.single_controller.base.worker_group import WorkerGroup
    from verl.trainer.ppo.trainer import PPOStepContext
    from verl.utils.step_context import StepContext


class WeightsOnDemand:
    """Stands where public programs tell engines to take weights or to sleep, which these do by themselves."""

    def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing: the next generation begins with the trained weights."""

    def sleep_replicas(self) -> None:
        """Do nothing: an engine frees its memory after it generated, as ``rollout.free_cache_engine`` says."""

    def wake_up_replicas(self) -> None:
        """Do nothing: an engine wakes when it generates."""


class PassedGenerations(RecordFolder):
    """Passes the samples of a step to the ``_dump_generations`` of a subclass, which writes them."""

    def __init__(self, folder: RecordFolder, dump: Callable[..., object]) -> None:
        super().__init__(None if folder.folder is None else str(folder.folder))
        self._dump = dump

    def write(self, step: int, records: Iterable[Mapping[str, object]], append: bool = False) -> None:
        """See :meth:`RecordFolder.write`."""
        rows = list(records)
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        fields = {name: columns.pop(key, []) for name, key in FIELDS.items()}
        if self.folder is not None:
            self._dump(**fields, reward_extra_infos_dict=columns, dump_path=str(self.folder))


FIELDS = {"inputs": "input", "outputs": "output", "gts": "gts", "scores": "score"}
"""Arguments of ``_dump_generations`` and their names in a record."""
PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
CALLERS = {
    "_get_gen_batch": ("fit", "step"),
    "_balance_batch": ("fit", "step"),
    "_get_dp_size": ("fit", "step"),
    "_compute_reward_colocate": ("fit", "step"),
    "_val_metrics_update": ("_validate",),
    "_merge_validation_results": ("_validate",),
    "_write_generations": ("_dump_generations",),
    "_init_dump_executor": ("_dump_generations",),
    "_shutdown_dump_executor": ("_dump_generations",),
}
"""Methods that verl's own run does not call, and which methods of a subclass may call them."""


class RayPPOTrainer(PPOTrainer):
    """The trainer under its public name, with the attributes and methods that a ``fit`` of a subclass uses.

    A subclass may replace :meth:`step`, a stage of it, or all of ``fit``. It is made as
    :class:`verl.trainer.ppo.trainer.PPOTrainer` is. With verl's own ``fit`` it may also replace ``_create_dataloader``,
    ``_validate``, ``_save_checkpoint``, ``_load_checkpoint``, ``_dump_generations``, ``_log_rollout_data``,
    ``_maybe_log_val_generations``, ``_start_profiling``, ``_stop_profiling``, ``_compute_old_log_prob``,
    ``_compute_ref_log_prob``, ``_compute_values``, ``_update_critic`` and ``_update_actor``. One that replaces a method
    that nothing would call (:data:`CALLERS`) is refused when the class is created.
    """

    hybrid_engine: bool = True
    """Actor and rollout engine share processes."""
    max_steps_duration: float = 0.0
    """Seconds of the longest step, for a ``fit`` that keeps count of it."""
    _sampled: tuple[int, int] = (0, 0)
    """The last step in which :meth:`_generate_sequences` sampled, and how many prompts."""
    _assigned_manager: Any = None
    _manager: ProgramAgentLoopManager | None = None
    _running: PPOStepContext | None = None
    """The context of the stage that a part under its public name computes."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a class with methods that nothing would call.

        Raises:
            ConfigError: names the first one, and what to replace instead.
        """
        super().__init_subclass__(**kwargs)
        for name, callers in CALLERS.items():
            if _is_replaced(cls, name) and not any(_is_replaced(cls, caller) for caller in callers):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: verl's own {callers[0]} does not use it. Replace "
                    f"{' or '.join(callers)} too, which may call it, or remove it (docs/custom_trainers.md)."
                )

    def _create_dataloader(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable | None = None,
        train_sampler: Sampler | None = None,
    ) -> None:
        """Create the data loaders.

        An ``__init__`` of a subclass that does not call verl's ends with this call: then the trainer is completed here
        from the attributes that it has set, which keep their values.
        """
        if "typed_config" in vars(self):
            super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
            return
        assigned = dict(vars(self))
        optional = ("processor", "ray_worker_group_cls", "reward_fn", "val_reward_fn", "device_name")
        PPOTrainer.__init__(
            self,
            self.config,  # type: ignore[arg-type]
            self.tokenizer,
            self.role_worker_mapping,
            self.resource_pool_manager,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
            **{name: assigned.get(name) for name in optional},
        )
        vars(self).update(assigned)

    # ---- what the run has -----------------------------------------------------------------------

    @functools.cached_property
    def config(self) -> DictConfig:
        """The configuration as Hydra composes it, also with keys that nothing here reads.

        It belongs to the code of the subclass: the run itself has :attr:`typed_config`, of the same values.
        """
        return as_composed(self.typed_config)

    @property
    def needs(self) -> Needs:
        """The optional parts of a step, as the configuration and assignments to the attributes below say."""
        parts = {"critic": self.use_critic, "reference": self.use_reference_policy, "reward_model": self.use_rm}
        return replace(self._configured_needs, **parts)

    @needs.setter
    def needs(self, needs: Needs) -> None:
        self._configured_needs = needs

    # Cached, so that a program may assign them, also before ``__init__``.
    @functools.cached_property
    def use_critic(self) -> bool:
        """Whether there is a critic, :attr:`critic_wg`."""
        return self._configured_needs.critic

    @functools.cached_property
    def use_reference_policy(self) -> bool:
        """Whether there is a reference policy, :attr:`ref_policy_wg` or the actor's workers (:attr:`ref_in_actor`)."""
        return self._configured_needs.reference

    @functools.cached_property
    def ref_in_actor(self) -> bool:
        """Whether the reference policy is the actor without its LoRA adapters, and :attr:`ref_policy_wg` is None."""
        return self.typed_config.actor_rollout_ref.model.has_adapters

    @functools.cached_property
    def use_rm(self) -> bool:
        """Whether there is a reward model, :attr:`rm_wg`."""
        return self._configured_needs.reward_model

    @functools.cached_property
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

    @functools.cached_property
    def checkpoint_manager(self) -> WeightsOnDemand:
        """What moves weights to rollout engines elsewhere; here engines take new weights when they generate."""
        return WeightsOnDemand()

    @property
    def async_rollout_manager(self) -> Any:
        """The engines and agent loops, for ``generate_sequences``, or what a program assigned."""
        if self._assigned_manager is not None or (group := self.actor_rollout_wg) is None:
            return self._assigned_manager
        if self._manager is None or self._manager.worker_group is not group:
            self._manager = ProgramAgentLoopManager(self.config, group)  # kept: a program may set attributes of it
        return self._manager

    @async_rollout_manager.setter
    def async_rollout_manager(self, manager: object) -> None:
        self._assigned_manager = manager

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
        """See :meth:`TrainingLoop.resume`.

        Raises:
            ConfigError: a program assigned something of its own to generate with, which verl's step does not use.
        """
        manager = type(self._assigned_manager)
        if self._assigned_manager is not None and not manager.__module__.startswith("verl."):
            raise ConfigError(
                f"async_rollout_manager is {manager.__module__}.{manager.__qualname__}, which verl's own fit would not "
                "generate with. Write your own fit, or derive a class from verl.experience.lockstep.Lockstep and set "
                "it as experience_class of the trainer (docs/custom_trainers.md)."
            )
        self._load_checkpoint()

    def _begin_save(self) -> None:
        if _is_replaced(type(self), "_save_checkpoint"):
            self._save_checkpoint()
        else:
            super()._begin_save()

    def _save_checkpoint(self) -> None:
        """See :meth:`TrainingLoop._save_checkpoint`."""
        super()._begin_save()
        self.checkpoint.finish()

    def _use_workers(self) -> None:
        replaces_dump = _is_replaced(type(self), "_dump_generations")
        if _is_replaced(type(self), "_log_rollout_data"):
            self.dump = PassedGenerations(self.dump, lambda **_: None)  # report() writes them
        elif replaces_dump:
            self.dump = PassedGenerations(self.dump, self._dump_generations)
        super()._use_workers()
        if self.validator is not None and replaces_dump:
            self.validator.dump = PassedGenerations(self.validator.dump, self._dump_generations)
        replaced = [name for name in ("_compute_old_log_prob", "_update_actor") if _is_replaced(type(self), name)]
        if replaced and self.old_log_probs_plan.source == "update":
            self.old_log_probs_plan = replace(
                self.old_log_probs_plan, source="forward", reason=f"{type(self).__name__} replaces {replaced[0]}"
            )

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

    @contextmanager
    def _in_part(self) -> Iterator[PPOStepContext]:
        """Yield the context of the stage: that of verl's own step, or a new one for a ``fit`` of a subclass."""
        before = self._running
        self._running = before or self.new_context()
        try:
            yield self._running
        finally:
            self._running = before

    def _by_part(self, name: str, stage: Callable[..., Any], batch: DataProto, context: PPOStepContext) -> Any:
        """Compute a stage of verl's own step, by the method ``name`` if a subclass has replaced it."""
        if self._running is context or not _is_replaced(type(self), name):
            return stage(batch, context)
        before, self._running = self._running, context
        try:
            result = getattr(self, name)(batch)
        finally:
            self._running = before
        return result[0] if isinstance(result, tuple) else result

    def old_log_probs(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """See :meth:`PPOTrainer.old_log_probs`."""
        if self.typed_config.algorithm.rollout_correction.bypass_mode:
            return super().old_log_probs(batch, context)
        return self._by_part("_compute_old_log_prob", super().old_log_probs, batch, context)

    def reference(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """See :meth:`PPOTrainer.reference`."""
        return self._by_part("_compute_ref_log_prob", super().reference, batch, context)

    def values(self, batch: DataProto, context: PPOStepContext) -> DataProto:
        """See :meth:`PPOTrainer.values`."""
        return self._by_part("_compute_values", super().values, batch, context)

    def update_critic(self, batch: DataProto, context: PPOStepContext) -> DataProto | DataProtoFuture:
        """See :meth:`PPOTrainer.update_critic`."""
        updated = self._by_part("_update_critic", super().update_critic, batch, context)
        return self._updated_by_part(updated, context)

    def update_actor(
        self, batch: DataProto, context: PPOStepContext, own_forward: bool = False
    ) -> DataProto | DataProtoFuture:
        """See :meth:`PPOTrainer.update_actor`."""
        stage = functools.partial(super().update_actor, own_forward=own_forward)
        return self._updated_by_part(self._by_part("_update_actor", stage, batch, context), context)

    def _updated_by_part(
        self, updated: DataProto | DataProtoFuture, context: PPOStepContext
    ) -> DataProto | DataProtoFuture:
        """Put metrics that the method of a subclass returned into the context."""
        if isinstance(updated, DataProtoFuture):
            return updated.then(lambda ready: wait_for(self._updated_by_part(ready, context)))
        if "metrics" in updated.meta_info:
            context.metrics |= reduce_metrics(updated.meta_info["metrics"])
        return updated.select(meta_info_keys=[])

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """Return ``old_log_probs`` and ``entropys``, and the share of the device's peak that it took (0: unknown)."""
        with self._in_part() as context:
            columns = self.old_log_probs(batch, context)
        used = compute_mfu_metrics(context.flops, self.arithmetic, context.seconds)
        return columns, used.get("perf/mfu/actor_infer", 0.0)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` under the frozen reference."""
        with self._in_part() as context:
            return self.reference(batch, context)

    def _compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` of the critic."""
        with self._in_part() as context:
            return self.values(batch, context)

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
        is_own_step = self._running is not None  # which times the stage and counts bad steps itself

        def outcome() -> DataProto:
            if name == "update_actor" and not is_own_step:
                self.bad_steps.stop_if_too_many(context.number)
            return DataProto(meta_info={"metrics": context.metrics})

        with self._in_part() as context, nullcontext() if is_own_step else context.stage(name):
            updated = update(batch, context)
            if not isinstance(updated, DataProtoFuture):
                return outcome()

        @functools.cache  # get() may be called twice, and the update is recorded once
        def waited_for() -> DataProto:
            with nullcontext() if is_own_step else context.stage(name):
                updated.get()
                return outcome()

        return DataProtoFuture(collect_fn=lambda _: waited_for(), futures=[])

    # ---- samples --------------------------------------------------------------------------------

    def report(self, batch: DataProto, rewards: RewardRecord, context: PPOStepContext) -> None:
        """See :meth:`PPOTrainer.report`; a ``_log_rollout_data`` of a subclass writes the samples of the step."""
        super().report(batch, rewards, context)
        folder = self.typed_config.trainer.rollout_data_dir
        if folder and _is_replaced(type(self), "_log_rollout_data"):
            names = {name for draw in rewards.draws for name in draw.names} & batch.non_tensor_batch.keys()
            extra = {name: batch.non_tensor_batch[name].tolist() for name in sorted(names)}
            self._log_rollout_data(batch, extra, context.seconds, folder)

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
            records = generation_records(self.global_steps, self.tokenizer, batch, scores, extra, self.reward_fn)
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
        """Restore workers, data position and ``global_steps`` as ``trainer.resume_mode`` says; 0 for a new run.

        Workers that an ``init_workers`` of a subclass has started are in use from here on.
        """
        if not self.checkpoint.groups:
            self._use_workers()
        super().resume()

    @contextmanager
    def observed(self, context: StepContext) -> Iterator[None]:
        """See :meth:`TrainingLoop.observed`."""
        if not any(_is_replaced(type(self), name) for name in ("_start_profiling", "_stop_profiling")):
            with super().observed(context):
                yield
            return
        is_due = context.number in self.profiles.steps
        self._start_profiling(is_due)
        yield
        self._stop_profiling(is_due)

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
                "verl.utils.profiler.DistProfilerExtension too (docs/custom_trainers.md), or start no profiling; "
                "timing_s/* is always logged."
            )
        return found


_PARTS = {name: getattr(RayPPOTrainer, name) for name in dir(RayPPOTrainer)}


def _is_replaced(cls: type, name: str) -> bool:
    """Whether a class has another method of a name than this module gave it, by inheritance or by assignment."""
    return getattr(cls, name, None) is not _PARTS.get(name)


PPOTrainer.default = RayPPOTrainer  # a program that imports the class may have replaced methods of it
