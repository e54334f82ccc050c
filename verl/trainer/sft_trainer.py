"""``python -m verl.trainer.sft_trainer``: supervised fine-tuning on the engine that RL uses.

A sequence is handed to the engine as a one-token prompt and a response that is all the rest,
with the loss mask as response mask. So the loss is the mean of ``-log p(token)`` over the masked
tokens of the whole batch, whatever the micro-batches, the packing and the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.config import SFTConfig
from verl.trainer.config.load import hydra_entry, load_config
from verl.trainer.controller import run_under_controller
from verl.trainer.loop import Metrics
from verl.trainer.supervised import SupervisedRunner, SupervisedTrainer
from verl.trainer.supervisor import supervised
from verl.trainer.timing import stage
from verl.utils.dataset.loading import batches

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class SFTTrainer(SupervisedTrainer):
    """Fits a language model to the responses of a dataset: rows of input_ids, attention_mask, position_ids, loss_mask.

    For the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """See :func:`to_batch`."""
        batch = to_batch(rows)
        require_trained(int(batch.batch["response_mask"].sum()), f"step {self.global_steps}", self.config.data)
        return batch

    @stage("testing")
    def validate(self) -> Metrics:
        """``val/loss``: mean loss per masked token over the whole validation set."""
        assert self.val_dataloader is not None
        loss, tokens = 0.0, 0
        for rows in batches(self.val_dataloader):
            batch = to_batch(rows)
            log_probs = self.workers.compute_log_prob(batch).batch["log_probs"]
            mask = batch.batch["response_mask"]
            loss -= (log_probs * mask).sum().item()
            tokens += int(mask.sum())
        require_trained(tokens, "data.val_files", self.config.data)
        return {"val/loss": loss / tokens}


def require_trained(tokens: int, what: str, data: Any) -> None:
    """Check that rows read by the ``data`` section have a token that counts.

    Raises:
        DataError: they have none.
    """
    if not tokens:
        raise DataError(
            f"{what}: no token of the assistant is left (data.max_length={data.max_length}, data.truncation="
            f"{data.truncation}), so there is nothing to learn. Raise data.max_length; "
            "`python -m verl.trainer.inspect_data sft` shows what the cut takes."
        )


def to_batch(rows: Mapping[str, Any]) -> DataProto:
    """A supervised batch in the layout of RL: one-token prompt, the rest is the response."""
    ids = rows["input_ids"]
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": rows["attention_mask"],
            "position_ids": rows["position_ids"],
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "response_mask": rows["loss_mask"][:, 1:],
        }
    )


class SFTRunner(SupervisedRunner):
    """Assembles a supervised run from its configuration and drives it."""

    role = "sft"
    trainer_class = SFTTrainer

    def worker_class(self) -> type:
        """A language model under the supervised loss."""
        from verl.workers.engine_workers import TrainingWorker

        return TrainingWorker

    def open_data(self, config: SFTConfig, tokenizer: Any, files: Any, max_samples: int) -> Dataset:
        """Conversations, or prompts and responses."""
        from verl.utils.dataset import create_sft_dataset

        return create_sft_dataset(files, config.data, tokenizer, max_samples=max_samples)

    def collate_fn(self, config: SFTConfig, tokenizer: Any) -> Callable:
        """Pads at the right."""
        from verl.utils.dataset import sft_collate_fn

        return sft_collate_fn(tokenizer, config.data)


def run_sft(config: SFTConfig) -> None:
    """Run one supervised training, on Ray or in this process (``trainer.controller``)."""
    config = config if isinstance(config, SFTConfig) else load_config(config, SFTConfig)
    run_under_controller(SFTRunner, config)


def main() -> None:
    """The command line; under ``torchrun`` rank 0 drives and starts the ranks through Ray."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    hydra_entry(supervised(run_sft), config_name="sft_trainer", root=SFTConfig)


if __name__ == "__main__":
    main()
