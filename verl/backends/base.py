"""The interface between a training engine and the kind of device that it computes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.utils.sharded_tensor import full_tensor


class Backend:
    """The backend of one engine on one rank. This default relies on PyTorch alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def install(self, model: nn.Module, units: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        """Replace the collectives of ``model`` by faster ones for this device, in place. Collective.

        Args:
            model: already placed on its ranks, with no weight gathered.
            units: the model's FSDP units; empty if it is not sharded.
            group: ranks among which each weight is sharded.
        """
        self._model = model

    def use_fast_layers(self, dtype: torch.dtype) -> Callable[[], None] | None:
        """Replace layers of the model by faster ones for this device, in place.

        Args:
            dtype: number format in which the model computes.

        Returns:
            a function that undoes it; None if no layer is replaced.
        """
        return None

    def frozen_weights(self) -> AbstractContextManager[None]:
        """Context for several passes during which no weight changes, so weights may be exchanged once. Collective."""
        return nullcontext()

    def whole_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and unsharded weights. Collective: every rank must iterate to the end.

        The tensors are valid until the next iteration over the weights begins; copy them to keep them longer.

        Args:
            dtype: to which the caller converts them; those that are gathered may be converted before.
        """
        for name, weight in self._model.named_parameters():
            yield name, full_tensor(weight, self.device, dtype)
