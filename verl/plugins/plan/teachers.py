"""Teachers of a run: where they are, which rows they score, and what the update of the policy keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.config import DistillationConfig, DistillationTeacherModelConfig
from verl.plugins.plan.memory import ModelMemory

WHOLE_VOCABULARY = ("forward_kl", "reverse_kl", "jsd")
"""Divergences of the whole vocabulary, whose teachers compute in the update of the policy."""
AVERAGE_BYTES = 4
"""Bytes of a parameter in the copy of a policy that teaches itself with other weights than its own."""


@dataclass(frozen=True)
class PlannedTeachers:
    """Teachers of a run, as its memory and time depend on them.

    Args:
        config: the section ``distillation``.
    """

    config: DistillationConfig

    @property
    def separate(self) -> Mapping[str, DistillationTeacherModelConfig]:
        """Teachers with a model of their own on GPUs of the run, by name; endpoints are elsewhere."""
        if not self.config.enabled or self.config.is_self_distillation:
            return {}
        return {name: teacher for name, teacher in self.config.teachers.items() if teacher.inference.name != "openai"}

    @property
    def are_forward_passes(self) -> bool:
        """Return whether they are forward passes of the training engine; else each is an engine."""
        return self.config.has_forward_passes

    @property
    def ranks(self) -> int:
        """Ranks of their own pool; 0 where they are on those that train."""
        return self.config.ranks if self.separate else 0

    @property
    def read_whole_vocabulary(self) -> bool:
        """Return whether the loss compares the whole vocabulary."""
        return self.config.enabled and self.config.distillation_loss.loss_mode in WHOLE_VOCABULARY

    @property
    def share(self) -> float:
        """The part of the rows that each teacher scores, if they have equally many."""
        return 1.0 if self.read_whole_vocabulary else 1 / max(1, len(self.config.teachers))

    def offloads(self, teacher: DistillationTeacherModelConfig) -> bool:
        """Return whether a teacher leaves the device while others compute; one alone on its ranks stays."""
        return teacher.inference.free_cache_engine and not (self.config.ranks > 0 and len(self.config.teachers) == 1)

    def average(self, policy: ModelMemory) -> float:
        """Bytes on a rank of the copy of a policy whose teacher has other weights than its own."""
        self_distillation = self.config.self_distillation
        if not self.config.is_self_distillation or self_distillation.weights == "policy":
            return 0.0
        return policy.trained * AVERAGE_BYTES / policy.layout.shards / policy.layout.tensor


def output_bytes(teacher: ModelMemory) -> float:
    """Bytes of a teacher's whole output matrix, which every rank has during an update over the whole vocabulary."""
    return teacher.shape.vocabulary * teacher.shape.hidden * teacher.layout.compute_bytes
