"""``python -m verl.trainer.dpo_trainer``: direct preference optimisation on the engine that RL uses.

    r(y) = β (log π(y | x) - log π_ref(y | x))
    loss = - mean over pairs of log σ(r(chosen) - r(rejected))

Paper: https://arxiv.org/abs/2305.18290. The losses of the same form (IPO, hinge, label smoothing, SimPO)
are settings; see :mod:`verl.trainer.ppo.core_algos.preference`. The reference is the policy before
training, frozen beside it in every worker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto
from verl.trainer.config.load import hydra_entry, load_config
from verl.trainer.config.preference import DPOConfig
from verl.trainer.controller import run_under_controller
from verl.trainer.preference import PreferenceRunner, PreferenceTrainer, as_rows
from verl.trainer.sft_trainer import to_batch
from verl.trainer.supervisor import supervised
from verl.workers.preference_losses import DirectPreferenceLoss


class DPOTrainer(PreferenceTrainer):
    """Fits a policy to pairs.

    For the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    config: DPOConfig

    def __init__(self, config: DPOConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.loss = DirectPreferenceLoss(config.loss)

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """Rows as supervised training has them: one-token prompt, the rest is the response."""
        return to_batch(as_rows(rows))

    def with_reference(self, batch: DataProto) -> DataProto:
        """The batch with ``ref_log_prob``, unless the loss is reference-free."""
        return batch if self.loss.config.reference_free else batch | self.workers.compute_ref_log_prob(batch)

    def useful_flops(self, batch: DataProto) -> float | None:
        """As of every trainer, and the reference's forward pass; None if that is another model."""
        own = super().useful_flops(batch)
        if self.loss.config.reference_free or own is None:
            return own
        is_same = self.config.ref.path in (None, self.config.model.path)
        return own * 4 / 3 if is_same else None  # a training step is three times a forward pass

    def outputs(self, batch: DataProto) -> DataProto:
        """Log-probs of the policy."""
        return self.workers.compute_log_prob(batch)


class DPORunner(PreferenceRunner):
    """Assembles a run of direct preference optimisation from its configuration and drives it."""

    role = "policy"
    trainer_class = DPOTrainer

    def worker_class(self) -> type:
        """A policy under the preference loss, with its reference."""
        from verl.workers.engine_workers import DirectPreferenceWorker

        return DirectPreferenceWorker


def run_dpo(config: DPOConfig) -> None:
    """Run direct preference optimisation, on Ray or in this process (``trainer.controller``)."""
    config = config if isinstance(config, DPOConfig) else load_config(config, DPOConfig)
    run_under_controller(DPORunner, config)


def main() -> None:
    """The command line; under ``torchrun`` rank 0 drives and starts the ranks through Ray."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    hydra_entry(supervised(run_dpo), config_name="dpo_trainer", root=DPOConfig)


if __name__ == "__main__":
    main()
