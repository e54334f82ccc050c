"""Training on pairs of a chosen and a rejected response: the common part of reward models and DPO.

A batch of P pairs becomes 2P rows, alternating chosen and rejected. A pair is never split between ranks or
micro-batches, and the loss is divided by the pairs of the whole batch, so that loss and gradient do not depend on
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from verl.datasets.loading import batches
from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.supervised import SupervisedRunner, SupervisedTrainer, processor_of
from verl.utils.metric import Metrics
from verl.workers.engine import BatchTotals, LossFunction, PartialSum
from verl.workers.engine.model.images import COLUMN as IMAGES

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase

    from verl.config import PreferenceConfig


class PreferenceTrainer(SupervisedTrainer):
    """Train a model on pairs: input_ids, attention_mask, position_ids, loss_mask, each (pairs, 2, length).

    For the arguments see :class:`verl.trainer.supervised.SupervisedTrainer`.
    """

    rows_per_unit = 2
    loss: LossFunction
    """The loss for training and validation; subclasses set it."""

    def with_reference(self, batch: DataProto) -> DataProto:
        """Add the reference columns that the loss reads; by default there are none."""
        return batch

    def outputs(self, batch: DataProto) -> DataProto:
        """Compute the model outputs that the loss reads, for validation."""
        raise NotImplementedError(f"{type(self).__name__} must say what the loss reads.")

    def train_on(self, batch: DataProto) -> DataProto:
        """Take one optimizer step; return its metrics."""
        return self.workers.train_batch(self.with_reference(batch))

    def _validate(self) -> Metrics:
        """Average the loss and its metrics over all validation pairs."""
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
                assert isinstance(mean, PartialSum)
                sums[name] = sums.get(name, 0.0) + float(mean.value) * count
            pairs += count
        return {f"val/{name}": total / pairs for name, total in sums.items()}


def as_rows(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Reshape columns of (pairs, 2, length) to (2 · pairs, length), alternating chosen and rejected.

    ``position_ids`` of a model with images, (pairs, 2, 4, length), become (2 · pairs, 4, length), and both sides share
    the pair's ``multi_modal_inputs``.

    Raises:
        DataError: a column has another shape, or a side has no token with ``loss_mask`` 1.
    """
    names = ("input_ids", "attention_mask", "position_ids", "loss_mask")
    for name in names:
        shape = tuple(pairs[name].shape)
        axes = 4 if name == "position_ids" and IMAGES in pairs else 3
        if len(shape) != axes or shape[1] != 2:
            raise DataError(f"column '{name}' of a batch of pairs has shape {shape}; it should be (pairs, 2, length).")
    empty = pairs["loss_mask"].sum(-1).eq(0).nonzero().tolist()
    if empty:
        pair, side = empty[0]
        raise DataError(
            f"the {('chosen', 'rejected')[side]} side of pair {pair} of the batch has no response token (loss_mask "
            "is 0 everywhere), so there is nothing to compare. Remove the pair, or raise data.max_length."
        )
    rows = {name: pairs[name].flatten(0, 1) for name in names}
    return rows | ({IMAGES: np.repeat(pairs[IMAGES], 2)} if IMAGES in pairs else {})


def last_response_token(loss_mask: Tensor) -> Tensor:
    """Mask of the last token of each row with ``loss_mask`` 1; (rows, length)."""
    to_the_end = loss_mask.flip(-1).cumsum(-1).flip(-1)
    return loss_mask * (to_the_end == 1)


class PreferenceRunner(SupervisedRunner):
    """Assemble and drive a training on pairs."""

    def open_data(
        self, config: PreferenceConfig, tokenizer: PreTrainedTokenizerBase, files: str | Sequence[str], max_samples: int
    ) -> Dataset:
        """Open the data set of pairs."""
        from verl.datasets.build import create_rm_dataset
        from verl.trainer.config.load import data_section

        return create_rm_dataset(files, data_section(config), tokenizer, processor_of(config), max_samples)

    def collate_fn(self, config: PreferenceConfig, tokenizer: PreTrainedTokenizerBase) -> Callable:
        """A function that pads pairs on the right into a batch."""
        from verl.datasets import pair_collate_fn

        return pair_collate_fn(tokenizer, config.data)
