<<<<<<< HEAD
"""The columns of a teacher that is a forward pass of a training engine."""

from __future__ import annotations

from collections.abc import Mapping

from verl.algorithms.distillation import Reads
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.teacher.prompts import rows_for_teacher

COLUMNS: Mapping[Reads, Mapping[str, str]] = {
    "sampled": {"log_probs": "teacher_logprobs", "entropy": "teacher_entropys"},
    "topk": {
        "log_probs": "teacher_logprobs",
        "entropy": "teacher_entropys",
        "top_ids": "teacher_topk_ids",
        "top_log_probs": "teacher_topk_logprobs",
    },
    "full": {"hidden": "teacher_hidden"},
}
"""By what a distillation loss reads: outputs of the teacher's engine, and the batch columns that they become."""


def teacher_columns(
    engine: BaseEngine,
    batch: DataProto,
    reads: Reads,
    micro: MicroBatchConfig,
    temperature: float = 1.0,
    topk: int | None = None,
) -> DataProto:
    """Compute the columns of the teacher that a distillation loss reads; collective.

    Args:
        engine: the teacher.
        batch: this rank's rows, with the prompts of the policy or also with those of the teacher.
        reads: of the loss.
        micro: size of the passes.
        temperature: divisor of the teacher's logits.
        topk: most likely tokens, for a loss of them.

    Raises:
        ConfigError: the loss reads the most likely tokens, and ``topk`` is None.
    """
    if reads == "topk" and topk is None:
        raise ConfigError("a distillation loss of the teacher's most likely tokens needs their number: set topk.")
    columns, more = COLUMNS[reads], {"topk": topk} if reads == "topk" else {}
    with engine.eval_mode():
        outputs = engine.infer_batch(rows_for_teacher(batch), set(columns), micro, temperature, **more)
    return DataProto.from_dict(tensors={column: outputs[name] for name, column in columns.items()})
=======
"""Teachers that are forward passes of frozen training engines."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig

from verl.algorithms.distillation import distillation_loss_info
from verl.config import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    DistillationConfig,
    DistillationTeacherModelConfig,
    FSDPEngineConfig,
    HFModelConfig,
    McoreEngineConfig,
    local_copies,
)
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.training_workers import EngineWorker


class ForwardTeacherWorker(EngineWorker):
    """Worker with frozen teachers; back end, precision and sizes of passes are those of ``actor_rollout_ref.ref``.

    Args:
        config: ``distillation``.
        roles: ``actor_rollout_ref``.
        device_name: see :class:`EngineWorker`.
    """

    def __init__(
        self,
        config: DistillationConfig | DictConfig,
        roles: ActorRolloutRefConfig | DictConfig,
        device_name: str | None = None,
    ) -> None:
        self.config = local_copies(DistillationConfig.of(config))
        self.roles = local_copies(ActorRolloutRefConfig.of(roles))
        super().__init__(CheckpointConfig(), device_name, self.roles.nccl_timeout)
        self.teachers: dict[str, BaseEngine] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers."""
        for name, teacher in self.config.teachers.items():
            engine = self.make_engine(
                "language_model", self.roles.ref.strategy, teacher_model(teacher, self.roles), self._placement(teacher)
            )
            if self.roles.actor.use_prefix_grouper:
                engine.check_shared_prompts("actor.use_prefix_grouper")
            self.teachers[name] = engine
        self.join_mesh("teacher", next(iter(self.teachers.values())))

    def _placement(self, teacher: DistillationTeacherModelConfig) -> FSDPEngineConfig | McoreEngineConfig:
        placement = self.roles.ref.placement
        is_alone = self.config.ranks > 0 and len(self.config.teachers) == 1
        offloads = teacher.inference.free_cache_engine and not is_alone
        return replace(placement, param_offload=placement.param_offload or offloads)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="teacher"))
    def compute_teacher_log_prob(self, data: DataProto, teacher: str) -> DataProto:
        """Compute what a teacher makes of the responses.

        Args:
            data: rows with the prompt that the teacher reads, and the policy's response.
            teacher: its name in ``distillation.teacher_models``.

        Returns:
            ``teacher_logprobs`` and ``teacher_entropys``, (bsz, response_length); for losses of the most likely tokens
            also ``teacher_topk_ids`` and ``teacher_topk_logprobs``, (bsz, response_length, topk).
        """
        ref, settings = self.roles.ref, self.config.distillation_loss
        columns = {"log_probs": "teacher_logprobs", "entropy": "teacher_entropys"}
        if distillation_loss_info(settings.loss_mode).reads == "topk":
            columns |= {"top_ids": "teacher_topk_ids", "top_log_probs": "teacher_topk_logprobs"}
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=ref.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=ref.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=ref.log_prob_max_token_len_per_gpu,
            shares_prompts=self.roles.actor.use_prefix_grouper,
        )
        engine, temperature = self.teachers[teacher], self.config.teachers[teacher].inference.temperature or 1.0
        with engine.eval_mode():
            outputs = engine.infer_batch(data, set(columns), micro, temperature)
        return DataProto.from_dict(tensors={column: outputs[name] for name, column in columns.items()})


def teacher_model(teacher: DistillationTeacherModelConfig, roles: ActorRolloutRefConfig) -> HFModelConfig:
    """Return the model section of a teacher: that of the policy, with the teacher's files and without adapters."""
    assert teacher.model_path is not None, "rules refuse a teacher without a model"
    return replace(
        roles.model,
        path=teacher.model_path,
        hf_config_path=None,
        tokenizer_path=roles.model.tokenizer_path or roles.model.path,
        lora_rank=0,
        lora_adapter_path=None,
    )
>>>>>>> 926e2244 (Runs learn from teachers: a forward pass of frozen models scores the policy's tokens, beside the rewards or instead of them)
