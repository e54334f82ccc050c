"""The weights of a model, each whole on every rank, for rollout engines and exports.

A rank that holds all rows lends its own tensors. Ranks on one machine gather into memory that they share, so that
there is one copy on the machine, whatever the number of ranks. Others gather one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.errors import ResourceError
from verl.utils.allocator import KEEP_BYTES
from verl.utils.shared_memory import shared_memory
from verl.workers.engine.fsdp.one_machine import meet
from verl.workers.engine.fsdp.sharding import full_tensor, local_part

BUCKET_BYTES = 64 << 20
"""What is gathered at a time: all that a rank needs beyond its rows, for a consumer that copies what it gets."""
_ALIGNMENT = 64


@dataclass(slots=True)
class _Weight:
    """Where the module keeps a parameter, and the tensor that is lent for it."""

    name: str
    owner: dict[str, nn.Parameter | None]
    key: str
    lent: Tensor | None = None
    pointer: int = 0
    """To the memory of what is lent."""

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, self.owner[self.key])

    def lend(self) -> Tensor:
        """The parameter without autograd; made anew only if the parameter has gone to other memory."""
        parameter = self.parameter
        pointer = parameter.data_ptr()
        if self.lent is None or self.pointer != pointer:
            self.lent, self.pointer = parameter.detach(), pointer
        return self.lent


@dataclass
class _Bucket:
    """Some weights, whole, one after the other."""

    weights: list[_Weight] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    """Byte at which each begins, and the first byte after the last."""
    memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.starts[-1]

    def add(self, weight: _Weight) -> None:
        self.weights.append(weight)
        self.starts.append(self.nbytes + -(-_nbytes(weight.parameter) // _ALIGNMENT) * _ALIGNMENT)

    def views(self, memory: Tensor) -> list[Tensor]:
        parameters = [weight.parameter for weight in self.weights]
        return [
            memory[start : start + _nbytes(p)].view(p.dtype).view(p.shape)
            for start, p in zip(self.starts, parameters, strict=False)
        ]


class WholeWeights:
    """Iterates over name and tensor of each weight. Collective: every rank iterates to the end.

    A tensor is valid until the next iteration begins; what is to be kept longer must be copied.

    Args:
        model: sharded or not; its parameters may change, their names and shapes may not.
        device: to gather on.
        group: ranks on one machine that hold the rows of each weight, on a CPU; None if they are somewhere else.
        bucket_bytes: what is gathered at a time; a larger tensor is gathered alone.
        keep_bytes: gathered weights up to this size keep their memory between iterations: new pages cost several times
            what it takes to write them.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._device, self._group = device, group
        self._weights = _weights_of(model)
        # On a GPU a tensor that is lent would keep memory that is given back while the model is idle.
        self._lends = device.type == "cpu" and not any(isinstance(w.parameter, DTensor) for w in self._weights)
        self._buckets = _buckets_of(self._weights, bucket_bytes) if group is not None else []
        self._keeps = sum(bucket.nbytes for bucket in self._buckets) <= keep_bytes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._group is not None:
            yield from self._shared(self._group)
            return
        for weight in self._weights:
            yield weight.name, weight.lend() if self._lends else full_tensor(weight.parameter, self._device)

    @torch.no_grad()
    def _shared(self, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
        meet(group)  # nobody uses what is overwritten
        for bucket in self._buckets:
            memory = bucket.memory
            if memory is None:
                memory = shared_memory(bucket.nbytes, group)
                if memory is None:
                    raise ResourceError(
                        "the ranks shared memory when they began, and can share no more of it. Look for the limits of "
                        "this process (ulimit -n, ulimit -v) and for memory that ran out."
                    )
            views = bucket.views(memory)
            for weight, whole in zip(bucket.weights, views, strict=True):
                rows, first = local_part(weight.parameter)
                whole[first : first + len(rows)] = rows
            meet(group)
            bucket.memory = memory if self._keeps else None
            for weight, whole in zip(bucket.weights, views, strict=True):
                yield weight.name, whole


def _weights_of(model: nn.Module) -> list[_Weight]:
    """Each parameter once, under the name that ``model.named_parameters()`` gives it."""
    found, seen = [], set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found.append(_Weight(f"{prefix}.{key}" if prefix else key, module._parameters, key))
    return found


def _buckets_of(weights: list[_Weight], size: int) -> list[_Bucket]:
    buckets = [_Bucket()]
    for weight in weights:
        if buckets[-1].weights and buckets[-1].nbytes + _nbytes(weight.parameter) > size:
            buckets.append(_Bucket())
        buckets[-1].add(weight)
    return buckets


def _nbytes(tensor: Tensor) -> int:
    """Of the whole tensor, also if this rank has some rows of it."""
    return tensor.numel() * tensor.dtype.itemsize
