"""LoRA adapters of several owners over one frozen base, computed in one pass.

The engine has one adapter of rank slots · R for each layer, of which each slot has R rows of A and R columns of B::

    A = [A_0; A_1; ...]  (slots · R, in)        B = [B_0, B_1, ...]  (out, slots · R)

A token of slot k computes ``x Wᵀ + s_k (x A_kᵀ) B_kᵀ``: of ``x Aᵀ`` what the other slots' rows give is set to 0. So a
gradient of a slot comes from its own tokens alone, and FSDP sees the weights of one adapter. A slot may have a smaller
rank than R: rows of A and columns of B that are 0 get no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.utils.sharded_tensor import local_rows
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.engine import FSDPLanguageModelEngine
from verl.workers.engine.loss import gathered
from verl.workers.engine.model.adapters import LORA_A, LORA_B, require_linear
from verl.workers.engine.model.headed import trained_parameters
from verl.workers.engine.model.inputs import ModelInputs
from verl.workers.engine.passes import MicroBatch

SLOT = "adapter_slot"
"""Column of a batch, (bsz,) int64: the slot whose adapter computes the row."""
NO_SLOT = -1
"""The slot of rows that are computed with the base alone."""


@dataclass(frozen=True)
class SlotPart:
    """Rows of one matrix of a slot's adapter, those that this rank has."""

    values: Tensor
    """A view into the engine's parameter: (rows, in) of A, or (rows, r) of B."""
    rows: slice
    """Indices of these rows in the slot's full matrix."""


@EngineRegistry.register("adapter_slots", ("fsdp", "fsdp2"))
class AdapterSlotsEngine(FSDPLanguageModelEngine):
    """A language model whose rows may each have another adapter; see the module.

    Its own optimizer is not used: each owner of a slot has one over :meth:`parts`.
    """

    _factors: Tensor
    """(slots + 1, slots · R): by slot the factor of each row's product with A; the last row, for no slot, is 0."""
    _token_factors: Tensor | None = None
    """(..., tokens, slots · R) factors in the running pass; None: the whole adapter is computed."""

    def divide_adapters(self, slots: int) -> None:
        """Divide the adapter among ``slots`` slots, whose scales are 0 until :meth:`set_scale`; called once.

        Raises:
            ConfigError: adapters are on experts or divided by columns, or the rank does not divide.
        """
        if self.tensor_mesh is not None:
            raise ConfigError(
                f"engine.tensor_parallel_size={self.tensor_mesh.size()} does not go with adapters of several owners, "
                "of which ranks hold whole rows. Set it to 1."
            )
        require_linear(self.adapters)
        total = self.model_config.lora_rank
        if total % slots:
            raise ConfigError(f"an adapter of rank {total} does not divide among {slots} slots.")
        self.slots, self.slot_rank = slots, total // slots
        self._factors = torch.zeros(slots + 1, total, device=self.device)
        for layer in self.adapters.values():
            [(_, down)] = layer.lora_A.items()
            down.register_forward_hook(self._select)

    def set_scale(self, slot: int, scale: float) -> None:
        """Set the scale s of a slot's adapter."""
        self._factors[slot, slot * self.slot_rank : (slot + 1) * self.slot_rank] = scale

    def _select(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Set the products with rows of other slots to 0; a forward hook of each A."""
        if self._token_factors is None:
            return None
        # Not a product with 0, which would be NaN where another slot's adapter overflows.
        return torch.where(self._token_factors != 0, output * self._token_factors, 0.0).to(output.dtype)

    def _inputs(self, part: MicroBatch) -> ModelInputs:
        inputs = super()._inputs(part)
        slots, mask = part.data.batch[SLOT], part.data.batch["attention_mask"].bool()
        rows = slots.unsqueeze(1).expand_as(mask)
        token_slots = rows[mask].unsqueeze(0) if inputs.packing is not None else rows[:, : inputs.input_ids.shape[1]]
        # Until the next pass begins: layers are computed again in the backward pass.
        self._token_factors = self._factors[token_slots.to(self.device)]
        return inputs

    def parts(self, slot: int, rank: int | None = None, grad: bool = False) -> dict[str, SlotPart]:
        """Return what this rank holds of a slot's adapter, by ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``.

        Args:
            slot: index of the slot.
            rank: rank r of the adapter, of which only the first rows of A and columns of B are returned; None: R.
            grad: return the gradients in place of the weights; those that are None are left out.
        """
        self._reshard()
        slot_parts = {}
        first, last = slot * self.slot_rank, slot * self.slot_rank + (self.slot_rank if rank is None else rank)
        for name, parameter in trained_parameters(self.model).items():
            tensor = parameter.grad if grad else parameter
            if tensor is None:
                continue
            local, start = local_rows(tensor)
            if name.endswith(LORA_A):
                low, high = (min(max(bound - start, 0), len(local)) for bound in (first, last))
                offset = start + low - first
                part = SlotPart(local[low:high], slice(offset, offset + high - low))
            else:
                assert name.endswith(LORA_B), name
                part = SlotPart(local[:, first:last], slice(start, start + len(local)))
            slot_parts[name.replace(".default.", ".")] = part
        return slot_parts

    def shapes(self, rank: int) -> dict[str, torch.Size]:
        """Return the shape of each whole matrix of an adapter of this rank, by the names of :meth:`parts`."""
        shapes = {}
        for name, parameter in trained_parameters(self.model).items():
            rows, columns = parameter.shape
            slot_shape = (rank, columns) if name.endswith(LORA_A) else (rows, rank)
            shapes[name.replace(".default.", ".")] = torch.Size(slot_shape)
        return shapes

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join what the ranks hold of matrices, rows in the order of the ranks; on the CPU. Collective."""
        mine = {name: part.detach().to("cpu", copy=True) for name, part in parts.items()}
        if dist.get_world_size() == 1:
            return mine
        ranks = gathered([mine])
        return {name: torch.cat([rank[name] for rank in ranks]) for name in mine}
