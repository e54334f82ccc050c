"""The order of the training prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class SeededShuffle(Sampler[int]):
    """Every epoch in an order of its own that depends on the seed and the number of the epoch alone.

    An epoch ends when its iterator is exhausted; how often ``iter`` was called before does not
    matter, so the order is the same for every number of loader workers. (A generator shared by the
    iterators, as torch's ``RandomSampler`` keeps one, advances with each of them, and a data loader
    makes as many as it likes.) Iterators carry their state, which is how a ``StatefulDataLoader``
    resumes in the middle of an epoch.

    Args:
        dataset: what to index.
        seed: any integer.
    """

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0
        """The epoch that the next iterator will read."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> _Epoch:
        return _Epoch(self)

    def order(self, epoch: int) -> list[int]:
        """The items of an epoch, in order."""
        generator = torch.Generator()
        # Two draws, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        generator.manual_seed(self.seed)
        offset = int(torch.randint(2**62, (1,), generator=generator).item())
        generator.manual_seed(offset + epoch)
        return torch.randperm(len(self), generator=generator).tolist()


class _Epoch(Iterator[int]):
    def __init__(self, sampler: SeededShuffle) -> None:
        self.sampler = sampler
        self.yielded = 0
        self._epoch: int | None = None
        self._order: list[int] = []

    def __next__(self) -> int:
        if self._epoch is None:
            self._begin(self.sampler.epoch)
        if self.yielded == len(self._order):
            self.sampler.epoch = self.epoch + 1
            raise StopIteration
        item = self._order[self.yielded]
        self.yielded += 1
        return item

    @property
    def epoch(self) -> int:
        return self.sampler.epoch if self._epoch is None else self._epoch

    def _begin(self, epoch: int) -> None:
        self._epoch, self._order = epoch, self.sampler.order(epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "yielded": self.yielded, "next_epoch": self.sampler.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin(state["epoch"])
        self.yielded = state["yielded"]
        self.sampler.epoch = state["next_epoch"]
