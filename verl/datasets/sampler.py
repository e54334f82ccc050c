"""Order of the training rows: samplers with a state, so that a run can resume in the middle of an epoch.

The state is in the sampler's iterator (``state_dict``, ``load_state_dict``), from where ``StatefulDataLoader`` saves
it. Data loaders may create iterators that they do not use, so an epoch begins only when its first item is requested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from verl.errors import CheckpointError

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.protocol import DataProto


class AbstractSampler(Sampler[int], ABC):
    """Base of the samplers for ``data.sampler``; ``data_config`` is the ``data`` section."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: object) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that adapts to the training batches.

    The trainer calls :meth:`update` after every step. Rows must not be prefetched before that, so
    ``data.dataloader_num_workers`` must be 0.
    """

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Adapt to a scored batch.

        Args:
            batch: all responses of a step. ``row_index`` (bsz,) is the row's number in the data set;
                ``token_level_scores`` (bsz, response_len) sums to the score.
        """


class SeededShuffle(Sampler[int]):
    """Shuffle each epoch by seed and epoch number alone.

    An epoch ends when its iterator is exhausted; unused iterators do not count, so the order does not depend on the
    number of loader workers. (The generator of torch's ``RandomSampler`` advances with each iterator.) Rows added to
    the data set are included from the next epoch on.
    """

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0
        """The epoch of the next iterator."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> _Epoch:
        return _Epoch(self)

    def order(self, epoch: int, length: int) -> list[int]:
        """The items of an epoch of ``length`` rows, in order."""
        return seeded_permutation(length, self.seed, epoch)


class InOrder(SeededShuffle):
    """Read each epoch in the order of the data set."""

    def __init__(self, dataset: Sized) -> None:
        super().__init__(dataset, seed=0)

    def order(self, epoch: int, length: int) -> list[int]:
        """0, 1, ..., length - 1."""
        return list(range(length))


def seeded_permutation(length: int, seed: int, epoch: int) -> list[int]:
    """A permutation of ``length`` items, as a function of seed and epoch."""
    generator = torch.Generator()
    # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
    generator.manual_seed(seed)
    offset = int(torch.randint(2**62, (1,), generator=generator).item())
    generator.manual_seed(offset + epoch)
    return torch.randperm(length, generator=generator).tolist()


class _Epoch(Iterator[int]):
    def __init__(self, sampler: SeededShuffle) -> None:
        self.sampler = sampler
        self.yielded = 0
        self._epoch: int | None = None
        self._order: list[int] = []
        self._is_checked = False

    def __next__(self) -> int:
        if self._epoch is None:
            self._begin(self.sampler.epoch, len(self.sampler))
        if self.yielded == len(self._order):
            self.sampler.epoch = self.epoch + 1
            raise StopIteration
        if not self._is_checked:
            require_rows(self.sampler.dataset, len(self._order))
            self._is_checked = True
        item = self._order[self.yielded]
        self.yielded += 1
        return item

    @property
    def epoch(self) -> int:
        return self.sampler.epoch if self._epoch is None else self._epoch

    def _begin(self, epoch: int, length: int) -> None:
        self._epoch, self._order = epoch, self.sampler.order(epoch, length)

    def state_dict(self) -> dict[str, int]:
        length = len(self.sampler) if self._epoch is None else len(self._order)
        return {"epoch": self.epoch, "yielded": self.yielded, "length": length, "next_epoch": self.sampler.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # Not len(sampler): the loader restores the rows of a growing data set only after this.
        self._begin(state["epoch"], state["length"])
        self.yielded = state["yielded"]
        self.sampler.epoch = state["next_epoch"]


class BatchSampler(AbstractSampler):
    """Base of samplers that draw whole batches of ``gen_batch_size`` or ``train_batch_size`` rows; no seed is seed 1.

    A batch is drawn when its first row is requested. An epoch has as many full batches as the data set has rows for at
    its beginning.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.dataset = data_source
        self.batch_size: int = data_config.get("gen_batch_size") or data_config.train_batch_size
        self.seed: int = 1 if data_config.seed is None else data_config.seed
        self.epoch = 0
        """The epoch of the next iterator."""
        self.batches = 0
        """Number of batches drawn so far, over all epochs."""

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size * self.batch_size

    def __iter__(self) -> _Batches:
        return _Batches(self)

    @abstractmethod
    def draw(self) -> list[int]:
        """Draw the rows of batch number ``self.batches``."""

    def progress(self) -> dict[str, object]:
        """State for checkpoints besides seed and counters: numbers, tensors, lists and dicts of them."""
        return {}

    def restore(self, progress: dict[str, object]) -> None:
        """Restore a saved :meth:`progress`."""


class _Batches(Iterator[int]):
    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler
        self.epoch = sampler.epoch
        self.yielded = 0
        self.length: int | None = None
        self.pending: list[int] = []

    def __next__(self) -> int:
        sampler = self.sampler
        if self.length is None:
            self.epoch, self.length = sampler.epoch, len(sampler)
        if self.yielded == self.length:
            sampler.epoch = self.epoch + 1
            raise StopIteration
        if not self.pending:
            self.pending = sampler.draw()
            sampler.batches += 1
        self.yielded += 1
        return self.pending.pop(0)

    def state_dict(self) -> dict[str, object]:
        sampler = self.sampler
        return {
            "epoch": self.epoch if self.length is not None else sampler.epoch,
            "yielded": self.yielded,
            "length": len(sampler) if self.length is None else self.length,
            "pending": list(self.pending),
            "next_epoch": sampler.epoch,
            "batches": sampler.batches,
            "progress": sampler.progress(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.yielded, self.length = state["epoch"], state["yielded"], state["length"]
        self.pending = list(state["pending"])
        self.sampler.epoch, self.sampler.batches = state["next_epoch"], state["batches"]
        self.sampler.restore(state["progress"])


def require_rows(dataset: Sized, count: int) -> None:
    """Check that a data set still has the ``count`` rows that a checkpoint refers to, else ``CheckpointError``."""
    if len(dataset) < count:
        raise CheckpointError(
            f"the checkpoint was made with {count} training rows, and there are {len(dataset)} now. Resume with the "
            "data and the filters that the run began with, or set resume_mode=disable."
        )
