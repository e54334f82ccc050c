"""The worker with teachers that are forward passes of frozen training engines."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.config import ActorRolloutRefConfig, CheckpointConfig, DistillationConfig, local_copies
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine_worker import EngineWorker
from verl.workers.teacher.frozen import FrozenTeachers


class ForwardTeacherWorker(EngineWorker):
    """Worker with frozen teachers; see :class:`FrozenTeachers`.

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
        self.config = local_copies(DistillationConfig.from_mapping(config))
        self.roles = local_copies(ActorRolloutRefConfig.from_mapping(roles))
        super().__init__(CheckpointConfig(), device_name, self.roles.nccl_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers."""
        self.teachers = FrozenTeachers(self.config, self.roles, self.make_engine)
        self.join_mesh("teacher", self.engines[0])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="teacher"))
    def compute_teacher_log_prob(self, data: DataProto, teacher: str) -> DataProto:
        """Compute what a teacher makes of the responses.

        Args:
            data: rows with the policy's responses, and ``teacher_prompts`` if the teacher reads others than the policy.
            teacher: its name in ``distillation.teacher_models``.

        Returns:
            ``teacher_logprobs`` and ``teacher_entropys``, (bsz, response_length); for losses of the most likely tokens
            also ``teacher_topk_ids`` and ``teacher_topk_logprobs``, (bsz, response_length, topk).
        """
        return self.teachers.columns(teacher, data)
