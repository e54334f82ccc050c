"""Memory of the host in which weights and optimizer states wait while others use the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl.utils.pinned_memory import HostPieces


class HostMemory:
    """Copies in the host's memory, which are kept for the next time: pinned memory takes longer to get than to fill.

    Args:
        is_pinned: let a GPU copy directly; it needs one.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.pieces = HostPieces(is_pinned)
        self._copies: dict[tuple[int, str], Tensor] = {}
        """Copies by the parameter's id and the name of its optimizer state ('' for the parameter itself)."""

    def move_model(self, model: nn.Module) -> None:
        """Move parameters and buffers to the host."""
        # As nn.Module.to, with another destination.
        model._apply(
            lambda tensor: self._moved(tensor, id(tensor), "") if isinstance(tensor, nn.Parameter) else tensor.cpu()
        )

    def move_states(self, optimizer: Optimizer) -> bool:
        """Move moments and other states with dimensions to the host; return whether one was elsewhere."""
        has_moved = False
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = self._moved(value, id(parameter), key)
                    has_moved |= state[key] is not value
        return has_moved

    def _moved(self, tensor: Tensor, parameter: int, state: str) -> Tensor:
        copy = self._copies.get((parameter, state))
        if copy is None:
            copy = torch.empty_like(tensor, device="cpu", requires_grad=False)
            with torch.no_grad():  # else to_local() returns another tensor over the same memory
                local = copy.to_local() if isinstance(copy, DTensor) else copy
                piece = self.pieces.take(local.nbytes).view(local.dtype)
                local.set_(piece.untyped_storage(), piece.storage_offset(), local.size(), local.stride())
            self._copies[parameter, state] = copy
        if _memory_of(copy) == _memory_of(tensor):  # it is here already; a tied weight comes twice
            return tensor
        # The copy is synchronous: FSDP copies a part with fewer rows than others again at once, to pad it.
        return copy.copy_(tensor.detach())


def _memory_of(tensor: Tensor) -> tuple[torch.device, int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.device, local.data_ptr()
