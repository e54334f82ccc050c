"""The worker with teachers that are forward passes of frozen training engines."""

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
    McoreEngineConfig,
    local_copies,
)
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.teacher.forward import teacher_columns
from verl.workers.teacher.tokenizers import teacher_model
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
            packs = self.roles.model.use_remove_padding
            model = replace(teacher_model(teacher.model_path, self.roles.model), use_remove_padding=packs)
            engine = self.make_engine("language_model", self.roles.ref.strategy, model, self._placement(teacher))
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
        micro = MicroBatchConfig(
            micro_batch_size_per_gpu=ref.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=ref.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=ref.log_prob_max_token_len_per_gpu,
            shares_prompts=self.roles.actor.use_prefix_grouper,
        )
        engine, temperature = self.teachers[teacher], self.config.teachers[teacher].inference.temperature or 1.0
        reads = distillation_loss_info(settings.loss_mode).reads
        return teacher_columns(engine, data, reads, micro, temperature, settings.topk)
