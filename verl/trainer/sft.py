"""Supervised fine-tuning: the trainer, and the runner that assembles it.

The loss is the mean of ``-log p(token)`` over all tokens of the batch with ``loss_mask`` 1. It does not depend on
micro-batches, packing or the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.config import SFTConfig
from verl.datasets.loading import batches
from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.supervised import SupervisedRunner, SupervisedTrainer, processor_of
from verl.utils.metric import Metrics

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase


class SFTTrainer(SupervisedTrainer):
    """Train a language model on the tokens with ``loss_mask`` 1.

    Rows have input_ids, attention_mask, position_ids and loss_mask. For the arguments see
    :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """Convert rows by :func:`to_batch`; raise DataError if no token is trained on."""
        batch = to_batch(rows)
        require_trained(int(batch.batch["response_mask"].sum()), f"step {self.global_steps}", self.typed_config.data)
        return batch

    def _validate(self) -> Metrics:
        """Compute ``val/loss`` as ``train/loss``: means over all tokens of the validation set with ``loss_mask`` 1.

        With a teacher its two terms are ``val/divergence`` and ``val/cross_entropy``.
        """
        assert self.val_dataloader is not None
        sums, tokens = defaultdict[str, float](float), 0
        for rows in batches(self.val_dataloader):
            batch = to_batch(rows)
            outputs, mask = self.workers.infer_batch(batch).batch, batch.batch["response_mask"]
            sums["cross_entropy"] -= (outputs["log_probs"] * mask).sum().item()
            if "divergence" in outputs.keys():
                sums["divergence"] += (outputs["divergence"] * mask).sum().item()
            tokens += int(mask.sum())
        require_trained(tokens, "data.val_files", self.typed_config.data)
        means = {name: total / tokens for name, total in sums.items()}
        if "divergence" not in means:
            return {"val/loss": means["cross_entropy"]}
        config = self.typed_config.distillation
        loss = config.distillation_loss.distillation_loss_coef * means["divergence"]
        loss += config.cross_entropy_coef * means["cross_entropy"]
        return {"val/loss": loss} | {f"val/{name}": mean for name, mean in means.items()}

    def useful_flops(self, batch: DataProto) -> float | None:
        """See :meth:`SupervisedTrainer.useful_flops`; None with a teacher, whose work is not known."""
        return None if self.typed_config.distillation.model_path else super().useful_flops(batch)


def require_trained(tokens: int, what: str, data: Any) -> None:
    """Raise DataError if ``what`` has 0 tokens to train on; ``data`` is the section it was read with."""
    if not tokens:
        raise DataError(
            f"{what}: no token of the assistant is left (data.max_length={data.max_length}, "
            f"data.truncation={data.truncation}), so there is nothing to learn. Raise data.max_length; `python -m "
            "verl.trainer.inspect_data sft` shows what truncation removes."
        )


def to_batch(rows: Mapping[str, Any]) -> DataProto:
    """Convert supervised rows to the columns of an RL batch: a one-token prompt, the rest is the response."""
    ids = rows["input_ids"]
    images = {name: rows[name] for name in ("multi_modal_inputs",) if name in rows}
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": rows["attention_mask"],
            "position_ids": rows["position_ids"],
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "response_mask": rows["loss_mask"][:, 1:],
        },
        non_tensors=images,
    )


class SFTRunner(SupervisedRunner):
    """Assemble and drive a supervised fine-tuning."""

    role = "sft"
    trainer_class = SFTTrainer

    def worker_class(self, config: SFTConfig) -> type:
        """The worker that trains a language model with the supervised loss, or also from a teacher."""
        from verl.workers.training_workers import DistillingWorker, TrainingWorker

        return TrainingWorker if config.distillation.model_path is None else DistillingWorker

    def check_further_models(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the teacher has the model's vocabulary.

        Raises:
            ConfigError: it has another one, or an embedding with fewer tokens.
        """
        from verl.utils import hf_tokenizer
        from verl.utils.model import check_tokenizer_fits, hf_config_of
        from verl.workers.teacher.tokenizers import check_same_tokenizer

        path = config.distillation.model_path
        if path is not None:
            teacher_tokenizer = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
            check_same_tokenizer(teacher_tokenizer, tokenizer, f"distillation.model_path={path}")
            check_tokenizer_fits(tokenizer, hf_config_of(config.teacher_model), warns=False)

    def open_data(
        self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, files: str | Sequence[str], max_samples: int
    ) -> Dataset:
        """Open the data set of conversations, or of prompts and responses."""
        from verl.datasets import create_sft_dataset
        from verl.trainer.config.load import data_section

        return create_sft_dataset(files, data_section(config), tokenizer, processor_of(config), max_samples)

    def collate_fn(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Callable:
        """A function that pads items on the right into a batch."""
        from verl.datasets import sft_collate_fn

        return sft_collate_fn(tokenizer, config.data)
