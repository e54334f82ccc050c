"""Training of a reward model on preference pairs with the Bradley-Terry loss: trainer and runner.

    loss = - mean over pairs of log σ(r(chosen) - r(rejected))

The reward r is the score at the last token of the response (its end-of-turn token), where ``main_ppo`` with
``reward_model.enable=True`` reads it. Set ``reward_model.model.path`` of such a run to the ``huggingface`` folder of a
checkpoint, which is written if ``checkpoint.save_contents`` has ``hf_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config import RMConfig
from verl.protocol import DataProto
from verl.trainer.preference import PreferenceRunner, PreferenceTrainer, as_rows, last_response_token
from verl.workers.engine.model.images import COLUMN as IMAGES
from verl.workers.losses import RewardModelLoss


class RMTrainer(PreferenceTrainer):
    """Train a reward model on pairs; for the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`."""

    def __init__(self, config: RMConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self.loss = RewardModelLoss(config.loss)

    def to_batch(self, rows: Mapping[str, object]) -> DataProto:
        """Convert pairs to rows whose ``response_mask`` is 1 at the last token of the response only."""
        columns = as_rows(rows)
        images = {IMAGES: columns.pop(IMAGES)} if IMAGES in columns else {}
        last_tokens = last_response_token(columns.pop("loss_mask"))
        return DataProto.from_dict(
            tensors={**columns, "responses": columns["input_ids"], "response_mask": last_tokens},
            non_tensors=images,
        )

    def outputs(self, batch: DataProto) -> DataProto:
        """Compute the scores, which are read at the last response token."""
        return self.workers.infer_batch(batch)


class RMRunner(PreferenceRunner):
    """Assemble and drive a reward-model training."""

    role = "reward_model"
    trainer_class = RMTrainer

    def worker_class(self, config: RMConfig) -> type:
        """The worker that trains a reward model."""
        from verl.workers.training_workers import RewardModelTrainingWorker

        return RewardModelTrainingWorker
