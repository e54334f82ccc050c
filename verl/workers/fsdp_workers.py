"""The workers of a PPO run: the remote methods that the driver calls for policy, rollout, reference, critic and reward.

Workers configure engines and call them; the engines compute.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig
from torch import Tensor

from verl.algorithms.distillation import distillation_loss_info, reads_vocabulary
from verl.checkpoint.ranks import RankState
from verl.checkpoint.states import State
from verl.config import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    DistillationConfig,
    FSDPCriticConfig,
    HFModelConfig,
    RewardModelConfig,
    UpdateConfig,
    local_copies,
)
from verl.config.rollout import IN_PROCESS_ENGINES
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.single_controller.base.board import Board
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import ensure_process_group, get_device, use_interface_to
from verl.utils.model import hf_config_of, switch_off_dropout, torch_dtype, training_randomness
from verl.utils.model_facts.time_limits import time_limits
from verl.utils.tokenizer import tokenizer_of
from verl.vision.families import TOWER, VisionConfig
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.engine.model.headed import pretrained_weights
from verl.workers.engine_worker import EngineWorker
from verl.workers.losses import (
    DistillationLoss,
    InterpolatedLoss,
    OwnForwardLoss,
    PolicyLoss,
    RecordedLoss,
    TokenRecord,
    ValueLoss,
)
from verl.workers.reward_input import RewardInput
from verl.workers.rollout.adapted_layers import computes_adapters
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, Weights, get_rollout_class
from verl.workers.rollout.engine_kwargs import applies_adapters
from verl.workers.rollout.request_queue import EngineRequests, RequestQueue
from verl.workers.teacher.average import AveragedWeights, without_average
from verl.workers.teacher.forward import teacher_columns
from verl.workers.teacher.frozen import FrozenTeachers
from verl.workers.transfer.plan import RankFacts, TransferPlan, TransferReport
from verl.workers.transfer.receiver import ReceivedWeights
from verl.workers.transfer.sender import Sections, WeightSender
from verl.workers.update import OptimizerSteps, UpdatePlan, mini_batch_size_per_rank, prepared_again

T = TypeVar("T")

# Models and engines that the worker of each role holds.
_PARTS = {
    "actor": {"actor"},
    "rollout": {"rollout"},
    "ref": {"ref"},
    "actor_rollout": {"actor", "rollout"},
    "actor_rollout_ref": {"actor", "rollout", "ref"},
}


def _on_device(
    engine: BaseEngine, closing: ExitStack, read: Callable[[], Iterable[tuple[str, Tensor]]]
) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """Keep the weights of ``engine`` on the device while they are read, and no longer.

    With ``param_offload`` the rollout engine has their memory while it samples. An engine that was lost reads again.
    What a reader leaves unread is closed with ``closing``.
    """

    def weights() -> Generator[tuple[str, Tensor]]:
        with engine.eval_mode():
            yield from read()

    def begin() -> Iterator[tuple[str, Tensor]]:
        reading = weights()
        closing.callback(reading.close)
        return reading

    return begin


class ActorRolloutRefWorker(EngineWorker):
    """Worker with the trained policy, a rollout engine and the frozen reference, or some of them.

    Args:
        role: ``actor``, ``rollout``, ``ref``, ``actor_rollout`` or ``actor_rollout_ref``.
        distillation_config: ``distillation``, if the policy learns from a teacher.
        device_name: see :class:`EngineWorker`.

    Raises:
        ConfigError: the role is unknown.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig | DictConfig,
        role: str,
        distillation_config: DistillationConfig | DictConfig | None = None,
        device_name: str | None = None,
    ) -> None:
        if role not in _PARTS:
            raise ConfigError(f"role '{role}' of ActorRolloutRefWorker is unknown. Use one of: {', '.join(_PARTS)}.")
        config = local_copies(ActorRolloutRefConfig.from_mapping(config))
        super().__init__(config.actor.checkpoint, device_name, config.nccl_timeout)
        self.config = config
        self.parts = _PARTS[role]
        self.ref: BaseEngine | None = None
        self.rollout: BaseRollout | None = None
        self.distillation = local_copies(DistillationConfig.from_mapping(distillation_config or {}))
        self.teachers: FrozenTeachers | None = None
        """Teachers of the whole vocabulary, whose hidden states never leave the rank."""
        self.policy_loss: PolicyLoss | DistillationLoss | None = None
        self.average: AveragedWeights | None = None
        """Averaged weights of the teacher in self-distillation; None if it has the current weights of the policy."""
        self.sender: WeightSender | None = None
        """Sends the trained policy's weights to ranks that only sample."""
        self.received: ReceivedWeights | None = None
        """Weights that a worker without a trained policy samples with, once it was sent some."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models and engines of the role."""
        model, actor, ref = self.config.model, self.config.actor, self.config.ref
        if not self.config.hybrid_engine:
            use_interface_to(os.environ["MASTER_ADDR"])  # NCCL reads it once, in a group that may be of one machine
        if "actor" in self.parts:
            self.engine = self.make_engine(
                "language_model",
                actor.strategy,
                self.config.trained_model,
                actor.placement,
                actor.optim,
                frozen=(TOWER,) if actor.freeze_vision_tower else (),
            )
            if actor.use_prefix_grouper:
                self.engine.check_shared_prompts("actor.use_prefix_grouper")
            distils, distillation = self.distillation.enabled, self.distillation
            self.policy_loss = DistillationLoss.from_config(actor, distillation) if distils else PolicyLoss(actor)
            self.join_mesh("actor", self.engine)
            if distillation.is_self_distillation:
                self.join_mesh("teacher", self.engine)
                settings = distillation.self_distillation
                if settings.weights != "policy":
                    decay = 1.0 if settings.weights == "initial" else settings.ema_decay
                    self.average = AveragedWeights(self.engine, decay)
            rollout = self.config.rollout
            self.sender = WeightSender(
                rollout.checkpoint_engine, self.rank, self.engine.device, torch_dtype(rollout.dtype)
            )
            if model.has_adapters:
                self.join_mesh("ref", self.engine)
        if "actor" in self.parts and reads_vocabulary(self.distillation):
            policy = self.engine if self.distillation.is_self_distillation else None
            self.teachers = FrozenTeachers(self.distillation, self.config, self.make_engine, policy)
        if "ref" in self.parts:
            self.ref = self.make_engine("language_model", ref.strategy, model, ref.placement)
            if actor.use_prefix_grouper:
                self.ref.check_shared_prompts("actor.use_prefix_grouper")
            self.join_mesh("ref", self.ref)
        if "rollout" in self.parts:  # last, because the rollout engine takes a share of the memory that is left
            self._init_rollout()

    def _init_rollout(self) -> None:
        model = self.config.model
        tokenizer = tokenizer_of(model)
        device, rollout = get_device(self.device_name), self.config.rollout
        if rollout.ranks_per_engine > 1:
            ensure_process_group(device, time_limits(model.path).collective_s)  # ranks of an engine exchange values
        self.rollout = get_rollout_class(self.config.rollout.name)(self.config.rollout, model, tokenizer, device)
        engine = self.rank // self.rollout.ranks_per_engine
        self._register_dispatch_collect_info("rollout", dp_rank=engine, is_collect=self.rollout.leads)
        if self.engine is None:
            self.received = ReceivedWeights(self.config.rollout.checkpoint_engine, self.rank, device)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response to each row with the current policy; see :mod:`verl.workers.rollout.request`."""
        with self._rollout_awake() as rollout:
            return rollout.generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, requests: EngineRequests) -> None:
        """Answer requests with the current policy, one by one as they come, until they are closed."""
        with ExitStack() as entered:
            rollout = entered.enter_context(self._rollout_awake())
            if rollout.leads:
                engine_index = self.rank // rollout.ranks_per_engine
                queue = entered.enter_context(requests.open_queue(engine_index, rollout.weight_version))
                queue.on_abort = rollout.abort
            else:  # the engine's requests are for its first rank alone
                queue = RequestQueue(lambda request, answer: None)
                queue.close()
            rollout.serve(queue)

    @contextmanager
    def _rollout_awake(self) -> Iterator[BaseRollout]:
        """Wake the rollout engine with the policy's weights: those trained here, or received, or at first of a file."""
        rollout, engine, dtype = _present(self.rollout, "rollout"), self.engine, torch_dtype(self.config.rollout.dtype)
        with ExitStack() as entered:
            weights: Weights
            if engine is None:
                received = _present(self.received, "rollout")
                weights, version = received.weights, received.version
                if version == NO_WEIGHTS:
                    weights, version = functools.partial(pretrained_weights, self.config.model, dtype), 0
            else:
                version, lend = engine.weight_version, functools.partial(_on_device, engine, entered)
                if rollout.shares_weights:
                    entered.enter_context(engine.eval_mode())
                if rollout.applies_adapters:
                    parts = engine.adapted_weights()
                    weights = AdaptedWeights(lend(parts.base), lend(parts.adapters), parts.scales)
                else:
                    weights = lend(functools.partial(engine.weights_for_rollout, dtype, rollout.takes_divided))
            yield entered.enter_context(rollout.awake(weights, version))

    # ---- weights from ranks that train to ranks that only sample; see verl.workers.transfer

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def transfer_facts(self) -> RankFacts:
        """Return what a transfer of weights must know of this rank."""
        return RankFacts.from_this_process(self.received.digests if self.received is not None else {})

    def serve_transfer_store(self, host: str) -> int:
        """Serve a key-value store for transfers from this rank, at its address ``host``; return the port."""
        return _present(self.sender, "actor").serve_store(host)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, plan: TransferPlan) -> TransferReport:
        """Send the trained policy's weights; collective over the ranks that train. Rank 0 returns their size.

        Raises:
            RolloutError: see :meth:`WeightSender.send`.
        """
        engine, sender, rollout = self.trained, _present(self.sender, "actor"), self.config.rollout
        sections: Sections = {"merged": functools.partial(engine.weights_for_rollout, torch_dtype(rollout.dtype))}
        scales: Mapping[str, float] = {}
        takes_adapters = computes_adapters if rollout.name in IN_PROCESS_ENGINES else applies_adapters
        if takes_adapters(rollout, self.config.model):
            adapted = engine.adapted_weights()
            sections, scales = {"base": adapted.base, "adapters": adapted.adapters}, adapted.scales
        with engine.eval_mode():
            return sender.send(plan, sections, scales)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, plan: TransferPlan, version: int) -> None:
        """Receive weights, which the rollout engine loads when it next wakes; ``version`` is that of its responses.

        Raises:
            ConfigError: this worker trains the policy that it samples from.
            RolloutError: see :meth:`ReceivedWeights.receive`. The engine cannot sample until weights are complete.
        """
        if self.engine is not None:
            raise ConfigError("this worker samples from the policy that it trains. Send weights to role 'rollout'.")
        self.weights_replaced()
        _present(self.received, "rollout").receive(plan, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def post_engine_state(self, board: Board) -> None:
        """Make the rollout engine post its state to a board, under the index of this rank, from now on."""
        rollout = _present(self.rollout, "rollout")
        if rollout.leads:
            rollout.on_state = functools.partial(board.post, self.rank)
            rollout.report_state()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute ``old_log_probs`` and ``entropys`` under the current policy, each (bsz, response_length).

        With ``actor.calculate_sum_pi_squared`` also ``sum_pi_squared``, with router replay R2 ``routed_experts``. If
        the batch has that column, it is replayed.
        """
        rollout = self.config.rollout
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=rollout.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=rollout.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=rollout.log_prob_max_token_len_per_gpu,
            shares_prompts=self.config.actor.use_prefix_grouper,
        )
        with self.trained.eval_mode():
            outputs = self.trained.infer_batch(data, set(self._log_prob_columns), micro, self.temperature)
        return DataProto.from_dict(tensors={column: outputs[name] for name, column in self._log_prob_columns.items()})

    @property
    def _log_prob_columns(self) -> dict[str, str]:
        """Map from outputs of the engine to columns of the batch."""
        columns = {"log_probs": "old_log_probs", "entropy": "entropys"}
        if self.config.actor.calculate_sum_pi_squared:
            columns["sum_pi_squared"] = "sum_pi_squared"
        if self.config.actor.router_replay.mode == "R2":
            columns["routed_experts"] = "routed_experts"
        return columns

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute ``ref_log_prob`` under the frozen reference, (bsz, response_length).

        A policy that is trained by LoRA adapters is its own reference, with the adapters switched off.
        """
        ref, is_actor = self.config.ref, self.ref is None and self.config.model.has_adapters
        engine = self.trained if is_actor else _present(self.ref, "ref")
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=ref.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=ref.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=ref.log_prob_max_token_len_per_gpu,
            shares_prompts=self.config.actor.use_prefix_grouper,
        )
        with engine.eval_mode(), engine.disable_adapter() if is_actor else nullcontext():
            outputs = engine.infer_batch(data, {"log_probs"}, micro, self.temperature)
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="teacher"))
    def compute_teacher_log_prob(self, data: DataProto, teacher: str = "") -> DataProto:
        """Compute teacher log-probs of the responses under the policy itself, with the prompts ``teacher_prompts``.

        Its weights are those of ``distillation.self_distillation.weights``. The columns are those of
        :meth:`verl.workers.teacher.worker.ForwardTeacherWorker.compute_teacher_log_prob`; ``teacher`` has no effect.
        """
        rollout, settings = self.config.rollout, self.distillation.distillation_loss
        (itself,) = self.distillation.teachers.values()
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=rollout.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=rollout.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=rollout.log_prob_max_token_len_per_gpu,
        )
        engine, reads = self.trained, distillation_loss_info(settings.loss_mode).reads
        with engine.eval_mode(), nullcontext() if self.average is None else self.average.in_model():
            temperature = itself.inference.temperature or 1.0
            vision = VisionConfig.from_config(hf_config_of(self.config.model))
            return teacher_columns(engine, data, reads, micro, temperature, settings.topk, vision)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(
        self,
        data: DataProto,
        entropy_coeff: float | None = None,
        own_forward: bool = False,
        mini_batch_sizes: Sequence[int] | None = None,
        record_tokens: bool = False,
    ) -> DataProto:
        """Update the policy on this batch.

        Args:
            data: mini-batches in the order of ``layout_for_ranks``, with the columns of ``prepare_update``.
            entropy_coeff: weight of the entropy bonus in this step; None uses ``actor.entropy_coeff``.
            own_forward: take ``old_log_probs`` from the update's own forward pass, because the batch has none; only for
                a batch that is one optimizer step.
            mini_batch_sizes: rows of each optimizer step on this rank, where trajectories have several sequences;
                None for ``ppo_mini_batch_size`` prompts each.
            record_tokens: return what the loss saw of each token.

        Returns:
            ``meta_info["metrics"]``, ``meta_info["non_finite"]`` and, of a mixture of experts,
            ``meta_info["expert_counts"]``, the same on every rank; with ``own_forward`` also the columns
            ``old_log_probs`` and ``entropys``, 0 where ``response_mask`` is; with ``record_tokens`` also
            ``update_log_probs`` and, of losses that tell it, ``update_clipped``, NaN where ``response_mask`` is 0; with
            teachers of the whole vocabulary ``teacher_logprobs`` and ``teacher_entropys``.

        Raises:
            ConfigError: ``own_forward`` with more than one optimizer step; later steps would compare the policy with
                itself instead of with the one that sampled.
        """
        engine, loss = self.trained, _present(self.policy_loss, "actor").with_entropy_coeff(entropy_coeff)
        plan = _plan("actor", self.config.actor, self.config.rollout.n, engine, self.temperature)
        if own_forward and (len(mini_batch_sizes or plan.sizes(len(data))) != 1 or plan.epochs != 1):
            raise ConfigError(
                f"{len(data)} sequences of this rank in mini-batches of {mini_batch_sizes or plan.mini_batch_size}, "
                f"{plan.epochs} times over, are more than one optimizer step: they need old_log_probs. Call "
                "compute_log_prob first."
            )
        update_record, forward_record = TokenRecord(len(data)), TokenRecord(len(data))
        if record_tokens:
            loss = RecordedLoss(loss, update_record)
        correction = self.config.actor.policy_loss.rollout_correction
        if own_forward:
            loss = OwnForwardLoss(loss, forward_record, correction)
        elif correction is not None and correction.interpolates:
            loss = InterpolatedLoss(loss, correction)
        if record_tokens or own_forward:
            data = forward_record.numbered(data)
        teacher_columns, teacher_metrics = DataProto(), dict[str, float]()
        if self.teachers is not None:
            with engine.eval_mode(), nullcontext() if self.average is None else self.average.in_model():
                columns, engine.divergence, teacher_metrics = self.teachers.whole_vocabulary(data)
            data, teacher_columns = data | columns, columns.select(["teacher_logprobs", "teacher_entropys"])
        steps = OptimizerSteps()
        with engine.train_mode():
            for k, rows in enumerate(plan.mini_batches(len(data), engine.weight_version, mini_batch_sizes)):
                part = data.select_idxs(rows)
                if k and loss.info.prepare is not None and loss.learns_from_rewards:
                    part = prepared_again(part, engine, plan, self.config.actor)
                report = engine.train_batch(part, loss, plan.micro, plan.temperature)
                steps.add(report, engine.non_finite, rows, engine.expert_counts)
            metrics = steps.metrics("actor", engine.lr_scheduler_step()) | teacher_metrics
            if self.average is not None:
                self.average.update()
        engine.divergence = None  # which holds the teachers' output matrices
        width = data.batch["response_mask"].shape[1]
        recorded = (forward_record.columns(width, missing=0.0), update_record.columns(width, missing=math.nan))
        return (
            self.report(metrics, steps.problems, engine, steps.expert_counts)
            | recorded[0]
            | recorded[1]
            | teacher_columns
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def training_randomness(self) -> dict[str, float]:
        """Return the settings that make the policy's forward pass random in training, such as dropout rates."""
        config = hf_config_of(self.config.model)
        switch_off_dropout(config, self.config.model.override_config)
        return training_randomness(config)

    @property
    def temperature(self) -> float:
        """Temperature at which log-probs are computed: that of sampling, or 1 if sampling is greedy."""
        rollout = self.config.rollout
        return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0

    def training_state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """See :meth:`EngineWorker.training_state`; the average by which the policy teaches itself is added."""
        state = super().training_state(global_step, contents, copied)
        return state if self.average is None or "model" not in contents else self.average.added_to(state, copied)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_bytes(self) -> int:
        """See :meth:`EngineWorker.snapshot_bytes`."""
        return self.trained.state_bytes() + (0 if self.average is None else self.average.nbytes())

    def load_training_state(self, folder: Path) -> None:
        """See :meth:`EngineWorker.load_training_state`."""
        super().load_training_state(folder)
        if self.average is not None and "model" in self.checkpoint.load_contents:
            self.average.load(folder)

    def restore_training_state(self, states: Mapping[str, State]) -> None:
        """See :meth:`EngineWorker.restore_training_state`."""
        super().restore_training_state(without_average(states))
        if self.average is not None:
            self.average.restore(states)

    def weights_replaced(self) -> None:
        """Make the rollout engine load the weights again."""
        # A restored version number may equal that of the engine's weights, although they differ.
        if self.rollout is not None:
            self.rollout.weight_version = NO_WEIGHTS


AsyncActorRolloutRefWorker = ActorRolloutRefWorker
"""Alias that scripts use with ``rollout.mode=async``, a setting that only rollout engines read."""


class CriticWorker(EngineWorker):
    """Worker with the value model; see :class:`EngineWorker` for ``device_name``."""

    def __init__(self, config: FSDPCriticConfig | DictConfig, device_name: str | None = None) -> None:
        config = local_copies(FSDPCriticConfig.from_mapping(config))
        super().__init__(config.checkpoint, device_name)
        self.config = config
        self.value_loss = ValueLoss(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model and make its optimizer."""
        model = HFModelConfig.like(self.config.model)
        self.engine = self.make_engine(
            "value_model", self.config.strategy, model, self.config.placement, self.config.optim
        )
        if self.config.use_prefix_grouper:
            self.engine.check_shared_prompts("critic.use_prefix_grouper")
        self.join_mesh("critic", self.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute ``values``, (bsz, response_length), of the state before each response token."""
        config = self.config
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.forward_micro_batch_size_per_gpu,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.forward_max_token_len_per_gpu,
            shares_prompts=config.use_prefix_grouper,
        )
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(data, {"values"}, micro))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def update_critic(self, data: DataProto, mini_batch_sizes: Sequence[int] | None = None) -> DataProto:
        """Fit the values to the returns of this batch; return metrics, the same on every rank, in ``meta_info``.

        ``mini_batch_sizes`` are those of :meth:`ActorRolloutRefWorker.update_actor`.
        """
        engine = self.trained
        plan = _plan("critic", self.config, self.config.rollout_n, engine)
        steps = OptimizerSteps()
        with engine.train_mode():
            for rows in plan.mini_batches(len(data), engine.weight_version, mini_batch_sizes):
                report = engine.train_batch(data.select_idxs(rows), self.value_loss, plan.micro)
                steps.add(report, engine.non_finite, rows)
            metrics = steps.metrics("critic", engine.lr_scheduler_step())
        return self.report(metrics, steps.problems, engine)


class RewardModelWorker(EngineWorker):
    """Worker with a frozen discriminative reward model, which gives one score per response."""

    def __init__(self, config: RewardModelConfig | DictConfig, device_name: str | None = None) -> None:
        super().__init__(CheckpointConfig(), device_name)
        self.config = local_copies(RewardModelConfig.from_mapping(config))
        self.model: BaseEngine | None = None
        self.inputs: RewardInput | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, after tokenizers and image processors if its own may differ from the policy's."""
        model = HFModelConfig.like(self.config.model)
        self.inputs = RewardInput.from_config(self.config.model, self.config.max_length)
        self.model = self.make_engine("reward_model", self.config.strategy, model, self.config.placement)
        self.join_mesh("reward", self.model)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute ``rm_scores``, (bsz, response_length): the score at the last response token, 0 elsewhere."""
        config, engine = self.config, _present(self.model, "reward model")
        inputs = _present(self.inputs, "reward model")
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.micro_batch_size_per_gpu,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.forward_max_token_len_per_gpu,
        )
        with engine.eval_mode():
            scores = engine.infer_batch(inputs.read(data), {"scores"}, micro)["scores"].sum(-1)
        return DataProto.from_dict(tensors={"rm_scores": inputs.place(scores, data)})


def _plan(name: str, section: UpdateConfig, n: int, engine: BaseEngine, temperature: float = 1.0) -> UpdatePlan:
    """Make the update plan of a configuration section for the ranks of ``engine``."""
    key = f"{name}.ppo_mini_batch_size"
    return UpdatePlan(
        mini_batch_size=mini_batch_size_per_rank(key, section.ppo_mini_batch_size, n, engine.get_data_parallel_size()),
        micro=MicroBatchConfig(
            micro_batch_size_per_gpu=section.ppo_micro_batch_size_per_gpu,
            use_dynamic_bsz=section.use_dynamic_bsz,
            max_token_len_per_gpu=section.ppo_max_token_len_per_gpu,
            shares_prompts=section.use_prefix_grouper,
        ),
        epochs=section.ppo_epochs,
        shuffle_seed=section.data_loader_seed if section.shuffle else None,
        temperature=temperature,
    )


def _present(part: T | None, name: str) -> T:
    if part is None:
        raise ConfigError(f"this worker holds no {name}: its role does not include it, or init_model was not called.")
    return part
