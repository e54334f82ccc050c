"""``python -m verl.trainer.rm_trainer``: a reward model from preferences, by Bradley-Terry.

    loss = - mean over pairs of log σ(r(chosen) - r(rejected))

The reward is the score at the last token of the response, its end-of-turn token: the place where
``main_ppo`` with ``reward_model.enable=True`` reads it. The ``huggingface`` folder of a checkpoint
(``checkpoint.save_contents`` with ``hf_model``) is the ``reward_model.model.path`` of such a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto
from verl.trainer.config.load import hydra_entry, load_config
from verl.trainer.config.preference import RMConfig
from verl.trainer.controller import run_under_controller
from verl.trainer.preference import PreferenceRunner, PreferenceTrainer, as_rows, last_response_token
from verl.trainer.supervisor import supervised
from verl.workers.preference_losses import RewardModelLoss


class RMTrainer(PreferenceTrainer):
    """Fits a reward model to pairs.

    For the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    def __init__(self, config: RMConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.loss = RewardModelLoss(config.loss)

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """Rows whose one place that counts is the last token of the response."""
        columns = as_rows(rows)
        chosen = last_response_token(columns.pop("loss_mask"))
        return DataProto.from_dict(
            tensors={**columns, "responses": columns["input_ids"], "response_mask": chosen},
        )

    def outputs(self, batch: DataProto) -> DataProto:
        """Scores."""
        return self.workers.compute_scores(batch)


class RMRunner(PreferenceRunner):
    """Assembles a reward-model run from its configuration and drives it."""

    role = "reward_model"
    trainer_class = RMTrainer

    def worker_class(self) -> type:
        """A reward model under Bradley-Terry."""
        from verl.workers.engine_workers import RewardModelTrainingWorker

        return RewardModelTrainingWorker


def run_rm(config: RMConfig) -> None:
    """Train one reward model, on Ray or in this process (``trainer.controller``)."""
    config = config if isinstance(config, RMConfig) else load_config(config, RMConfig)
    run_under_controller(RMRunner, config)


def main() -> None:
    """The command line; under ``torchrun`` rank 0 drives and starts the ranks through Ray."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    hydra_entry(supervised(run_rm), config_name="rm_trainer", root=RMConfig)


if __name__ == "__main__":
    main()
