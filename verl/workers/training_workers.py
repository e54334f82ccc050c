"""The workers of supervised, reward-model and preference training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from verl.algorithms.distillation import evaluate_distillation_loss
from verl.config import local_copies
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.model import hf_config_of
from verl.workers.engine import BaseEngine, LossFunction, MicroBatchConfig
from verl.workers.engine.loss import LossCallable, as_loss_function
from verl.workers.engine_worker import EngineWorker
from verl.workers.losses import DirectPreferenceLoss, DistilledSFTLoss, RewardModelLoss, sft_loss
from verl.workers.teacher.forward import full_divergence, teacher_columns

if TYPE_CHECKING:
    from verl.config import DPOConfig, RMConfig, SFTConfig, SupervisedConfig


class TrainingWorker(EngineWorker):
    """Worker that trains one model on given batches; by default a language model with the supervised loss.

    See :class:`EngineWorker` for ``device_name``.
    """

    model_type = "language_model"
    outputs: ClassVar[set[str]] = {"log_probs"}
    """Outputs that :meth:`infer_batch` computes."""

    def __init__(self, config: SupervisedConfig, device_name: str | None = None) -> None:
        super().__init__(config.checkpoint, device_name)
        self.config = config = local_copies(config, without=["data"])
        self.loss_fn: LossFunction = self.make_loss()
        self.micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
            use_dynamic_bsz=config.data.use_dynamic_bsz,
            max_token_len_per_gpu=config.data.max_token_len_per_gpu,
        )

    def make_loss(self) -> LossFunction:
        """Make the loss that is minimised."""
        return sft_loss

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and make its optimizer."""
        config = self.config
        self.engine = self.make_engine(
            self.model_type, config.engine.strategy, config.model, config.placement, config.optim
        )
        self.join_mesh("train", self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Load the model and make its optimizer, also again: what was trained since is dropped."""
        self.engines.clear()
        self.engine = None
        self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFunction | LossCallable) -> None:
        """Replace the loss; of a plain function see :func:`verl.workers.engine.loss.as_loss_function`."""
        self.loss_fn = as_loss_function(loss_fn)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, data: DataProto) -> DataProto:
        """Make one optimizer step.

        Returns:
            ``meta_info["metrics"]`` with loss, grad_norm, skipped_steps, lr and memory, and
            ``meta_info["non_finite"]`` with the reasons if the step was skipped, whose row numbers are per rank.
        """
        with self.trained.train_mode():
            metrics = self.trained.train_batch(data, self.loss_fn, self.micro)
            metrics["lr"] = self.trained.lr_scheduler_step()
        return self.report(metrics, self.trained.non_finite, self.trained, self.trained.expert_counts)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def infer_batch(self, data: DataProto) -> DataProto:
        """Compute ``log_probs``, (bsz, response_length); of a reward model ``scores`` at the tokens of the response."""
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(data, self.outputs, self.micro))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights and optimizer state to ``"cpu"`` or to the engine's device; gradients go with the weights."""
        self.trained.to(device, model, optimizer)


class DistillingWorker(TrainingWorker):
    """Worker that trains a language model to agree with a frozen teacher at the tokens of the data.

    Arguments as for :class:`TrainingWorker`.
    """

    config: SFTConfig

    def make_loss(self) -> LossFunction:
        """Make the divergence from the teacher, with the supervised loss beside it if that has a weight."""
        self.distilled = DistilledSFTLoss(self.config.distillation)
        return self.distilled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and the teacher."""
        super().init_model()
        config = self.config
        self.teacher = self.make_engine(
            "language_model", config.engine.strategy, config.teacher_model, config.teacher_engine
        )
        self.teacher.ids_below = hf_config_of(config.model).get_text_config().vocab_size
        if self.distilled.info.reads == "full":
            self.trained.divergence = full_divergence(config.distillation.distillation_loss, [(self.teacher, 1.0)])

    def _with_teacher(self, data: DataProto) -> DataProto:
        loss = self.config.distillation.distillation_loss
        return data | teacher_columns(self.teacher, data, self.distilled.info.reads, self.micro, topk=loss.topk)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, data: DataProto) -> DataProto:
        """Make one optimizer step; see :meth:`TrainingWorker.train_batch`."""
        return super().train_batch(self._with_teacher(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def infer_batch(self, data: DataProto) -> DataProto:
        """Compute ``log_probs`` and ``divergence``, (bsz, response_length)."""
        loss, data = self.distilled, self._with_teacher(data)
        settings = loss.config.distillation_loss
        with self.trained.eval_mode():
            outputs = self.trained.infer_batch(data, set(loss.outputs), self.micro, topk=settings.topk or 0)
        divergence, _ = evaluate_distillation_loss(loss.info, outputs, dict(data.batch.items()), settings)
        return DataProto.from_dict(tensors={"log_probs": outputs["log_probs"], "divergence": divergence})


class RewardModelTrainingWorker(TrainingWorker):
    """Worker that trains a reward model on preference pairs; arguments as for :class:`TrainingWorker`."""

    model_type = "reward_model"
    outputs: ClassVar[set[str]] = {"scores"}
    config: RMConfig

    def make_loss(self) -> LossFunction:
        """Make the Bradley-Terry loss."""
        return RewardModelLoss(self.config.loss)


class DirectPreferenceWorker(TrainingWorker):
    """Worker that trains a policy on preference pairs, with a frozen reference unless the loss needs none.

    Arguments as for :class:`TrainingWorker`.
    """

    config: DPOConfig

    def make_loss(self) -> LossFunction:
        """Make the DPO loss, or the variant of it that ``loss`` configures."""
        return DirectPreferenceLoss(self.config.loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy and, if the loss needs one that is not the policy without its adapters, the reference."""
        super().init_model()
        config = self.config
        self.reference: BaseEngine | None = None
        if not config.loss.reference_free and not config.reference_is_policy:
            self.reference = self.make_engine(
                "language_model", config.engine.strategy, config.reference_model, config.reference_engine
            )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Compute ``ref_log_prob`` under the reference, (bsz, response_length)."""
        is_policy = self.reference is None and self.config.reference_is_policy
        reference = self.trained if is_policy else self.reference
        if reference is None or self.config.loss.reference_free:
            raise ConfigError("reference_free=true: there is no reference whose log-probs could be computed.")
        with reference.eval_mode(), reference.disable_adapter() if is_policy else nullcontext():
            outputs = reference.infer_batch(batch, {"log_probs"}, self.micro)
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
