"""Training on pairs of a chosen and a rejected response: what reward models and direct preference optimisation share.

A batch of P pairs becomes 2P rows, chosen and rejected in turn. Pairs are dealt out to ranks and cut
into micro-batches whole, and the denominators count the pairs of the whole batch; so the loss and its
gradient do not depend on how they are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.loop import Metrics
from verl.trainer.supervised import SupervisedRunner, SupervisedTrainer
from verl.trainer.timing import stage
from verl.utils.dataset.loading import batches
from verl.workers.engine.base import BatchTotals, LossFn, Share

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from verl.trainer.config.preference import PreferenceConfig


class PreferenceTrainer(SupervisedTrainer):
    """Fits a model to pairs: input_ids, attention_mask, position_ids, loss_mask, each (pairs, 2, length).

    For the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    rows_per_unit = 2
    loss: LossFn
    """What is minimised, also measured on the validation pairs; set by subclasses."""

    def with_reference(self, batch: DataProto) -> DataProto:
        """The batch with what the loss compares with; nothing more, unless a subclass says so."""
        return batch

    def outputs(self, batch: DataProto) -> DataProto:
        """The model's outputs that the loss reads."""
        raise NotImplementedError(f"{type(self).__name__} must say what the loss reads.")

    def train_on(self, batch: DataProto) -> DataProto:
        """One optimizer step."""
        return self.workers.train_batch(self.with_reference(batch))

    @stage("testing")
    def validate(self) -> Metrics:
        """The loss and its metrics, as means over all validation pairs."""
        assert self.val_dataloader is not None
        sums: dict[str, float] = {}
        pairs = 0
        for rows in batches(self.val_dataloader):
            batch = self.with_reference(self.to_batch(rows))
            columns = self.outputs(batch).batch
            totals = BatchTotals(dp_size=1, batch_num_tokens=1, global_batch_size=len(batch))
            _, metrics = self.loss(dict(columns.items()), batch, totals)
            count = len(batch) // 2
            for name, mean in metrics.items():
                assert isinstance(mean, Share)
                sums[name] = sums.get(name, 0.0) + float(mean.value) * count
            pairs += count
        return {f"val/{name}": total / pairs for name, total in sums.items()}


def as_rows(pairs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Columns of (pairs, 2, length) to (2 · pairs, length): chosen and rejected in turn.

    Raises:
        DataError: a column has another shape, or a side has no token with ``loss_mask`` 1.
    """
    names = ("input_ids", "attention_mask", "position_ids", "loss_mask")
    for name in names:
        shape = tuple(pairs[name].shape)
        if len(shape) != 3 or shape[1] != 2:
            raise DataError(f"column '{name}' of a batch of pairs has shape {shape}; it should be (pairs, 2, length).")
    empty = pairs["loss_mask"].sum(-1).eq(0).nonzero().tolist()
    if empty:
        pair, side = empty[0]
        raise DataError(
            f"the {('chosen', 'rejected')[side]} side of pair {pair} of the batch has no response token (loss_mask is "
            "0 everywhere), so there is nothing to compare. Take the pair out, or raise data.max_length."
        )
    return {name: pairs[name].flatten(0, 1) for name in names}


def last_response_token(loss_mask: Tensor) -> Tensor:
    """1 at the last token of each row with ``loss_mask`` 1, 0 elsewhere; (rows, length)."""
    to_the_end = loss_mask.flip(-1).cumsum(-1).flip(-1)
    return loss_mask * (to_the_end == 1)


class PreferenceRunner(SupervisedRunner):
    """Assembles a run on pairs."""

    def open_data(self, config: PreferenceConfig, tokenizer: Any, files: Any, max_samples: int) -> Dataset:
        """Pairs."""
        from verl.utils.dataset.build import create_rm_dataset

        return create_rm_dataset(files, config.data, tokenizer, max_samples=max_samples)

    def collate_fn(self, config: PreferenceConfig, tokenizer: Any) -> Callable[..., dict[str, torch.Tensor]]:
        """Pads at the right."""
        from verl.utils.dataset import pair_collate_fn

        return pair_collate_fn(tokenizer, config.data)
