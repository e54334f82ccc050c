"""Unsharded weights of a model on CPUs, for rollout engines and exports.

A model that is not sharded yields its own tensors. Ranks on one machine gather into shared memory, so that the machine
holds one copy whatever the number of ranks; if that memory is kept, weights that are frozen beside trained ones (LoRA)
are gathered once. Other ranks gather one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.backends.cpu.allocator import KEEP_BYTES
from verl.backends.cpu.shared_memory import shared_memory
from verl.errors import ResourceError
from verl.utils.sharded_tensor import full_tensor, local_rows

BUCKET_BYTES = 64 << 20
"""Bytes gathered at a time; the extra memory needed while a consumer copies what it receives."""
_ALIGNMENT = 64  # bytes: a cache line, and the width of the widest vector register
_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Weight:
    """A parameter's place in its module, and the tensor without autograd that stands for it."""

    name: str
    owner: dict[str, nn.Parameter | None]
    key: str
    detached: Tensor | None = None
    pointer: int = 0
    """Address of the memory of ``detached``."""

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, self.owner[self.key])

    def without_autograd(self) -> Tensor:
        """Return the detached parameter; a new tensor only if the parameter has moved to other memory."""
        parameter = self.parameter
        pointer = parameter.data_ptr()
        if self.detached is None or self.pointer != pointer:
            self.detached, self.pointer = parameter.detach(), pointer
        return self.detached


@dataclass
class _Bucket:
    """Weights that are gathered together into one piece of memory."""

    weights: list[_Weight] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    """Offset in bytes of each weight, and the size of the bucket."""
    memory: Tensor | None = None
    is_frozen: bool = False
    """True if its weights never change."""

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
    """Iterable of names and unsharded weights. Collective: every rank must iterate to the end.

    The tensors are valid until the next iteration begins; copy them to keep them longer.

    Args:
        model: its parameters may be replaced later, but their names and shapes must stay.
        group: ranks on one machine among which the weights are sharded; None if they cannot share memory.
        bucket_bytes: bytes gathered at a time; a larger tensor is gathered alone.
        keep_bytes: if all weights are at most this large, their memory is kept between iterations: mapping new pages
            takes several times as long as writing to them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._group = group
        self._weights = _weights_of(model)
        self._is_unsharded = not any(isinstance(w.parameter, DTensor) for w in self._weights)
        self.copied_bytes = 0
        """Bytes that this rank wrote into shared memory in the last iteration."""
        self._keeps = sum(_nbytes(weight.parameter) for weight in self._weights) <= keep_bytes
        self._buckets: list[_Bucket] = []
        if group is not None and self._keeps:
            self._buckets = _buckets_by_change(self._weights, bucket_bytes)
        elif group is not None:
            self._buckets = _buckets_of(self._weights, bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._group is not None:
            yield from self._reused(self._group) if self._keeps else self._shared(self._group)
            return
        for weight in self._weights:
            yield weight.name, weight.without_autograd() if self._is_unsharded else full_tensor(weight.parameter, _CPU)

    @torch.no_grad()
    def _shared(self, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
        """Gather bucket by bucket, each into new memory."""
        self.copied_bytes = 0
        for bucket in self._buckets:
            views = bucket.views(_new_memory(bucket, group))
            self._write(bucket, views)
            dist.barrier(group=group)
            for weight, full in zip(bucket.weights, views, strict=True):
                yield weight.name, full

    @torch.no_grad()
    def _reused(self, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
        """Gather into memory that is kept, what is frozen only once, then yield in the order of the model."""
        dist.barrier(group=group)  # no rank still reads what is overwritten
        self.copied_bytes = 0
        weights: dict[str, Tensor] = {}
        for bucket in self._buckets:
            is_new = bucket.memory is None
            bucket.memory = _new_memory(bucket, group) if bucket.memory is None else bucket.memory
            views = bucket.views(bucket.memory)
            if is_new or not bucket.is_frozen:
                self._write(bucket, views)
            weights |= {weight.name: full for weight, full in zip(bucket.weights, views, strict=True)}
        dist.barrier(group=group)
        for weight in self._weights:
            yield weight.name, weights[weight.name]

    def _write(self, bucket: _Bucket, views: list[Tensor]) -> None:
        """Write this rank's rows of the bucket's weights."""
        for weight, full in zip(bucket.weights, views, strict=True):
            rows, first = local_rows(weight.parameter)
            full[first : first + len(rows)] = rows
            self.copied_bytes += rows.nbytes


def _weights_of(model: nn.Module) -> list[_Weight]:
    """List each parameter once, as ``model.named_parameters()`` does, with its place in its module."""
    weights, seen = [], set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                weights.append(_Weight(f"{prefix}.{key}" if prefix else key, module._parameters, key))
    return weights


def _new_memory(bucket: _Bucket, group: dist.ProcessGroup) -> Tensor:
    memory = shared_memory(bucket.nbytes, group)
    if memory is None:
        raise ResourceError(
            "the ranks shared memory when they began, and can share no more of it. Look for the limits of this process "
            "(ulimit -n, ulimit -v) and for memory that ran out."
        )
    return memory


def _buckets_by_change(weights: list[_Weight], size: int) -> list[_Bucket]:
    """Put weights that never change into buckets of their own."""
    trained = [weight for weight in weights if weight.parameter.requires_grad]
    if not trained:  # a whole model that is frozen may be loaded again
        return _buckets_of(weights, size)
    frozen = _buckets_of([weight for weight in weights if not weight.parameter.requires_grad], size)
    for bucket in frozen:
        bucket.is_frozen = True
    return [*(bucket for bucket in frozen if bucket.weights), *_buckets_of(trained, size)]


def _buckets_of(weights: list[_Weight], size: int) -> list[_Bucket]:
    buckets = [_Bucket()]
    for weight in weights:
        if buckets[-1].weights and buckets[-1].nbytes + _nbytes(weight.parameter) > size:
            buckets.append(_Bucket())
        buckets[-1].add(weight)
    return buckets


def _nbytes(tensor: Tensor) -> int:
    """Size of the whole tensor, also if this rank holds only some of its rows."""
    return tensor.numel() * tensor.dtype.itemsize
