"""The workers of a PPO run: what the driver may ask of one process. All work is done by engines.

ActorRolloutRefWorker   policy, rollout engine, frozen reference: whichever its role names
CriticWorker            value model
RewardModelWorker       discriminative reward model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import get_device
from verl.utils.model import hf_config_of, load_causal_lm, torch_dtype, training_randomness
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPCriticConfig,
    HFModelConfig,
    RewardModelConfig,
)
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.engine_workers import EngineWorker
from verl.workers.losses import OwnForwardLoss, PolicyLoss, ValueLoss
from verl.workers.reward_input import RewardInput
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, get_rollout_class
from verl.workers.update import UpdatePlan, mini_batch_size_per_rank, update

T = TypeVar("T")

_PARTS = {
    "actor": {"actor"},
    "rollout": {"rollout"},
    "ref": {"ref"},
    "actor_rollout": {"actor", "rollout"},
    "actor_rollout_ref": {"actor", "rollout", "ref"},
}
"""What the worker of each role holds."""


class ActorRolloutRefWorker(EngineWorker):
    """The policy and what belongs to it.

    Args:
        config: ``actor_rollout_ref``.
        role: ``actor``, ``rollout``, ``ref``, ``actor_rollout`` or ``actor_rollout_ref``.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.

    Raises:
        ConfigError: there is no such role.
    """

    def __init__(self, config: ActorRolloutRefConfig, role: str, device_name: str | None = None) -> None:
        if role not in _PARTS:
            raise ConfigError(f"role '{role}' of ActorRolloutRefWorker is unknown. Use one of: {', '.join(_PARTS)}.")
        super().__init__(config.actor.checkpoint, device_name, config.nccl_timeout)
        self.config = config
        self.parts = _PARTS[role]
        self.ref: BaseEngine | None = None
        self.rollout: BaseRollout | None = None
        self.policy_loss: PolicyLoss | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load what the role names; the rollout engine last, because it takes the memory that is left."""
        model, actor, ref = self.config.model, self.config.actor, self.config.ref
        if "actor" in self.parts:
            packed = dataclasses.replace(model, use_remove_padding=actor.use_remove_padding)
            self.engine = self.make_engine("language_model", actor.strategy, packed, actor.fsdp_config, actor.optim)
            self.policy_loss = PolicyLoss(actor)
            self.join_mesh("actor", self.engine)
        if "ref" in self.parts:
            self.ref = self.make_engine("language_model", ref.strategy, model, ref.fsdp_config)
            self.join_mesh("ref", self.ref)
        if "rollout" in self.parts:
            self._init_rollout()

    def _init_rollout(self) -> None:
        model = self.config.model
        tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path,
            chat_template=model.custom_chat_template,
            trust_remote_code=model.trust_remote_code,
        )
        device = get_device(self.device_name)
        self.rollout = get_rollout_class(self.config.rollout.name)(self.config.rollout, model, tokenizer, device)
        engine = self.rank // self.rollout.ranks_per_engine
        self._register_dispatch_collect_info("rollout", dp_rank=engine, is_collect=self.rollout.leads)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response to each row, by the policy as it is now; see :mod:`verl.workers.rollout.batch`."""
        rollout = _present(self.rollout, "rollout")
        if self.engine is None:
            with rollout.awake(self._pretrained_weights, version=0):
                return rollout.generate_sequences(prompts)
        with self.engine.eval_mode(), rollout.awake(self.engine.get_per_tensor_param, self.engine.weight_version):
            return rollout.generate_sequences(prompts)

    def _pretrained_weights(self) -> Iterable[tuple[str, Tensor]]:
        model = self.config.model
        hf_config = hf_config_of(model)
        dtype = torch_dtype(self.config.rollout.dtype)
        return load_causal_lm(model.path, hf_config, dtype, model.trust_remote_code).named_parameters()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys under the policy as it is now, each (bsz, response_length).

        With ``actor.calculate_sum_pi_squared`` also sum_pi_squared.
        """
        rollout = self.config.rollout
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=rollout.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=rollout.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=rollout.log_prob_max_token_len_per_gpu,
        )
        with self.trained.eval_mode():
            found = self.trained.infer_batch(batch, set(self._log_prob_columns), micro, self.temperature)
        return DataProto.from_dict(tensors={column: found[name] for name, column in self._log_prob_columns.items()})

    @property
    def _log_prob_columns(self) -> dict[str, str]:
        """The engine's output → the column that it becomes."""
        columns = {"log_probs": "old_log_probs", "entropy": "entropys"}
        if self.config.actor.calculate_sum_pi_squared:
            columns["sum_pi_squared"] = "sum_pi_squared"
        return columns

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob under the frozen reference, (bsz, response_length)."""
        ref, engine = self.config.ref, _present(self.ref, "ref")
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=ref.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=ref.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=ref.log_prob_max_token_len_per_gpu,
        )
        with engine.eval_mode():
            found = engine.infer_batch(batch, {"log_probs"}, micro, self.temperature)
        return DataProto.from_dict(tensors={"ref_log_prob": found["log_probs"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(
        self, batch: DataProto, entropy_coeff: float | None = None, own_forward: bool = False
    ) -> DataProto:
        """Improve the policy on this batch; ``meta_info["metrics"]``, the same on every rank.

        Args:
            batch: mini-batches as ``layout_for_ranks`` deals them, with the columns of ``prepare_update``.
            entropy_coeff: weight of the entropy bonus in this step; None takes ``actor.entropy_coeff``.
            own_forward: the batch is one optimizer step without ``old_log_probs``: those of its own forward pass
                are taken, and returned with ``entropys``.

        Raises:
            ConfigError: ``own_forward`` with more than one optimizer step; the later ones would compare the
                policy with itself instead of with the one that sampled.
        """
        engine, loss = self.trained, _present(self.policy_loss, "actor").with_entropy_coeff(entropy_coeff)
        plan = _plan("actor", self.config.actor, self.config.rollout.n, engine, self.temperature)
        if not own_forward:
            with engine.train_mode():
                return self.report(*update(engine, batch, loss, plan, prefix="actor"), engine)
        if len(batch) != plan.mini_batch_size or plan.epochs != 1:
            raise ConfigError(
                f"{len(batch)} sequences of this rank in mini-batches of {plan.mini_batch_size}, {plan.epochs} times "
                "over, are more than one optimizer step: they need old_log_probs. Call compute_log_prob first."
            )
        scoring = OwnForwardLoss(loss, len(batch))
        with engine.train_mode():
            metrics, problems = update(engine, scoring.numbered(batch), scoring, plan, prefix="actor")
        assert batch.batch is not None
        return self.report(metrics, problems, engine) | scoring.columns(batch.batch["response_mask"].shape[1])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def training_randomness(self) -> dict[str, float]:
        """Settings that make the policy's forward pass random in training; see :mod:`verl.utils.model`."""
        model = self.config.model
        return training_randomness(hf_config_of(model))

    @property
    def temperature(self) -> float:
        """Of the policy as it samples; a greedy one is scored at temperature 1."""
        rollout = self.config.rollout
        return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0

    def weights_replaced(self) -> None:
        """The rollout engine's copy is of other weights, whatever their version says."""
        if self.rollout is not None:
            self.rollout.weight_version = NO_WEIGHTS


AsyncActorRolloutRefWorker = ActorRolloutRefWorker
"""The name that scripts use with ``rollout.mode=async``; an engine decides itself how it serves requests."""


class CriticWorker(EngineWorker):
    """The value model.

    Args:
        config: ``critic``.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
    """

    def __init__(self, config: FSDPCriticConfig, device_name: str | None = None) -> None:
        super().__init__(config.checkpoint, device_name)
        self.config = config
        self.value_loss = ValueLoss(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model and make its optimizer."""
        section = self.config.model
        model = HFModelConfig(
            path=section.path,
            tokenizer_path=section.tokenizer_path,
            override_config=section.override_config,
            external_lib=section.external_lib,
            trust_remote_code=section.trust_remote_code,
            enable_gradient_checkpointing=section.enable_gradient_checkpointing,
            use_remove_padding=section.use_remove_padding,
        )
        self.engine = self.make_engine(
            "value_model", self.config.strategy, model, section.fsdp_config, self.config.optim
        )
        self.join_mesh("critic", self.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def compute_values(self, batch: DataProto) -> DataProto:
        """Values of the state before each response token, (bsz, response_length)."""
        config = self.config
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.forward_micro_batch_size_per_gpu,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.forward_max_token_len_per_gpu,
        )
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(batch, {"values"}, micro))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def update_critic(self, batch: DataProto) -> DataProto:
        """Fit the values to the returns of this batch; ``meta_info["metrics"]``, the same on every rank."""
        engine = self.trained
        plan = _plan("critic", self.config, self.config.rollout_n, engine)
        with engine.train_mode():
            return self.report(*update(engine, batch, self.value_loss, plan, prefix="critic"), engine)


class RewardModelWorker(EngineWorker):
    """A discriminative reward model: one score per response.

    Args:
        config: ``reward_model``.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
    """

    def __init__(self, config: RewardModelConfig, device_name: str | None = None) -> None:
        super().__init__(CheckpointConfig(), device_name)
        self.config = config
        self.model: BaseEngine | None = None
        self.inputs: RewardInput | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, and both tokenizers where they may differ."""
        section = self.config.model
        model = HFModelConfig(
            path=section.path,
            override_config=section.override_config,
            external_lib=section.external_lib,
            trust_remote_code=section.trust_remote_code,
            use_remove_padding=section.use_remove_padding,
        )
        self.inputs = RewardInput.of(section, self.config.max_length)
        self.model = self.make_engine("reward_model", self.config.strategy, model, section.fsdp_config)
        self.join_mesh("reward", self.model)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """rm_scores, (bsz, response_length): the score on the last response token, 0 elsewhere."""
        config, engine = self.config, _present(self.model, "reward model")
        inputs = _present(self.inputs, "reward model")
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.micro_batch_size_per_gpu,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.forward_max_token_len_per_gpu,
        )
        with engine.eval_mode():
            scores = engine.infer_batch(inputs.read(batch), {"scores"}, micro)["scores"].sum(-1)
        return DataProto.from_dict(tensors={"rm_scores": inputs.place(scores, batch)})


def _plan(
    name: str, section: ActorConfig | CriticConfig, n: int, engine: BaseEngine, temperature: float = 1.0
) -> UpdatePlan:
    """The update that a section describes, on the ranks of ``engine``."""
    key = f"{name}.ppo_mini_batch_size"
    return UpdatePlan(
        mini_batch_size=mini_batch_size_per_rank(key, section.ppo_mini_batch_size, n, engine.get_data_parallel_size()),
        micro=MicroBatchConfig(
            micro_batch_size_per_gpu=section.ppo_micro_batch_size_per_gpu,
            use_dynamic_bsz=section.use_dynamic_bsz,
            max_token_len_per_gpu=section.ppo_max_token_len_per_gpu,
        ),
        epochs=section.ppo_epochs,
        shuffle_seed=section.data_loader_seed if section.shuffle else None,
        temperature=temperature,
    )


def _present(part: T | None, name: str) -> T:
    if part is None:
        raise ConfigError(f"this worker holds no {name}: its role does not include it, or init_model was not called.")
    return part
