"""Direct preference optimisation (DPO): trainer and runner.

    r(y) = β (log π(y | x) - log π_ref(y | x))
    loss = - mean over pairs of log σ(r(chosen) - r(rejected))

Paper: https://arxiv.org/abs/2305.18290. IPO, hinge, label smoothing and SimPO are settings of the same loss; see
:mod:`verl.algorithms.preference`. Every worker holds the frozen reference (``ref.path``, by default the policy before
training) beside the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config import DPOConfig
from verl.protocol import DataProto
from verl.trainer.preference import PreferenceRunner, PreferenceTrainer, as_rows
from verl.trainer.sft import to_batch
from verl.workers.losses import DirectPreferenceLoss


class DPOTrainer(PreferenceTrainer):
    """Train a policy on preference pairs; for the arguments see :class:`~verl.trainer.supervised.SupervisedTrainer`."""

    config: DPOConfig

    def __init__(self, config: DPOConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.loss = DirectPreferenceLoss(config.loss)

    def to_batch(self, rows: Mapping[str, object]) -> DataProto:
        """Convert pairs to rows with a one-token prompt; the rest of each sequence is its response."""
        return to_batch(as_rows(rows))

    def with_reference(self, batch: DataProto) -> DataProto:
        """Add ``ref_log_prob``, unless the loss is reference-free."""
        return batch if self.typed_config.loss.reference_free else batch | self.workers.compute_ref_log_prob(batch)

    def useful_flops(self, batch: DataProto) -> float | None:
        """FLOPs of one optimizer step with the reference's forward pass; None if the reference is another model."""
        policy_flops = super().useful_flops(batch)
        if self.typed_config.loss.reference_free or policy_flops is None:
            return policy_flops
        is_same = self.typed_config.ref.path in (None, self.typed_config.model.path)
        # A training step costs three forward passes, the reference one more.
        return policy_flops * 4 / 3 if is_same else None

    def outputs(self, batch: DataProto) -> DataProto:
        """Log-probs of the policy."""
        return self.workers.infer_batch(batch)


class DPORunner(PreferenceRunner):
    """Assemble and drive a run of direct preference optimisation."""

    role = "policy"
    trainer_class = DPOTrainer

    def worker_class(self, config: DPOConfig) -> type:
        """The worker with the policy and its frozen reference."""
        from verl.workers.training_workers import DirectPreferenceWorker

        return DirectPreferenceWorker
