"""The optimizer over megatron-core's gradient buffers: fp32 weights, their state divided over data-parallel ranks.

Any optimizer of ``optim.optimizer_impl`` whose steps treat elements one by one (Adam, SGD ...) may be used, because a
rank's share is a flat part of a buffer, not a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.checkpoint.shards import for_optimizer
from verl.config import FSDPOptimizerConfig
from verl.workers.engine.megatron.library import parallel_state
from verl.workers.engine.optimizer import build_optimizer


@dataclass(frozen=True)
class _Range:
    """A parameter, or the part of it, inside a share."""

    first: int
    """Its first element in the share."""
    end: int
    offset: int
    """The place of that element in the parameter."""


@dataclass(frozen=True)
class _Share:
    """A stretch of weights whose state this rank has: one parameter, or its part of a bucket of several."""

    main: nn.Parameter
    """fp32; the weights themselves if these are fp32."""
    weights: Tensor
    gradient: Tensor
    """Of the stretch, in megatron-core's buffer."""
    bounds: Mapping[str, tuple[int, int]]
    """First element and end of each parameter in the bucket that all data-parallel ranks share."""
    first: int
    """Place of the share in that bucket."""
    bucket_size: int
    group: dist.ProcessGroup
    """The ranks that have the other shares of the bucket."""

    @classmethod
    def of(
        cls,
        weights: Tensor,
        gradient: Tensor,
        bounds: Mapping[str, tuple[int, int]],
        first: int,
        bucket_size: int,
        group: dist.ProcessGroup,
    ) -> _Share:
        """Make the share with an fp32 copy of its weights if they have another format."""
        weights = weights.detach()
        return cls(nn.Parameter(weights.float()), weights, gradient, bounds, first, bucket_size, group)

    def ranges(self) -> Iterator[tuple[str, _Range]]:
        """Iterate over the parameters that have elements in the share."""
        end = self.first + self.weights.numel()
        for name, (start, stop) in self.bounds.items():
            begin, finish = max(start, self.first), min(stop, end)
            if begin < finish:
                yield name, _Range(begin - self.first, finish - self.first, begin - start)


class MegatronOptimizer:
    """Optimizer of the pieces of a model of megatron-core.

    Args:
        pieces: ``DistributedDataParallel`` each, with its gradient buffers.
        config: class and settings.
        is_distributed: whether each data-parallel rank has the state of its part only.
        counted: parameters whose gradients this rank counts in the norm: one copy of each weight over all ranks that
            share a model.
    """

    def __init__(
        self, pieces: Sequence[Any], config: FSDPOptimizerConfig, is_distributed: bool, counted: set[str]
    ) -> None:
        self.pieces = pieces
        self.is_distributed = is_distributed
        self.counted = counted
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.expert_group = parallel_state.get_expert_data_parallel_group()
        self.parameters = {
            f"{piece_index}.{name}": p
            for piece_index, piece in enumerate(pieces)
            for name, p in piece.module.named_parameters()
            if p.requires_grad
        }
        self._shares = list(self._divided() if is_distributed else self._single())
        self.torch = build_optimizer([share.main for share in self._shares], config)
        """The optimizer of ``config``, over this rank's shares."""

    def _single(self) -> Iterator[_Share]:
        for name, parameter in self.parameters.items():
            size = parameter.numel()
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            yield _Share.of(parameter, gradient, {name: (0, size)}, 0, size, self.group)

    def _divided(self) -> Iterator[_Share]:
        names = {parameter: name for name, parameter in self.parameters.items()}
        dense = [(buffer, self.group) for piece in self.pieces for buffer in piece.buffers]
        sparse = [(buffer, self.expert_group) for piece in self.pieces for buffer in piece.expert_parallel_buffers]
        for buffer, group in dense + sparse:
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            for bucket in buffer.buckets:
                size = bucket.param_data.numel()
                ranges = {names[p]: buffer.param_index_map[p][:2] for p in bucket.params_list}
                bounds = {name: (a - bucket.offset, b - bucket.offset) for name, (a, b) in ranges.items()}
                weights, gradient = (data.chunk(ranks)[rank] for data in (bucket.param_data, bucket.grad_data))
                yield _Share.of(weights, gradient, bounds, rank * (size // ranks), size, group)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for piece in self.pieces:
            piece.zero_grad_buffer()
        self.torch.zero_grad(set_to_none=True)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of this rank by parameter, cut to its share."""
        for share in self._shares:
            flat = share.gradient.view(-1)
            yield from ((name, flat[part.first : part.end]) for name, part in share.ranges())

    def grad_norm(self) -> float:
        """Norm of all gradients, in fp32, the same on every rank. Collective."""
        device = next(iter(self.parameters.values())).device
        dense, sparse = torch.zeros((), device=device), torch.zeros((), device=device)
        for name, gradient in self.gradients():
            if name in self.counted:
                square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
                (dense if getattr(self.parameters[name], "allreduce", True) else sparse).add_(square)
        totals = [(dense, parallel_state.get_model_parallel_group(), self.group)]
        sizes = self.pieces[0].module.config
        # On every stage, also without experts to train. Ranks that share the experts in another way than the layers
        # have other sums of them, also where each has all experts.
        if (
            sizes.expert_model_parallel_size > 1
            or sizes.expert_tensor_parallel_size != sizes.tensor_model_parallel_size
        ):
            expert_ranks = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            totals.append((sparse, expert_ranks, self.expert_group))
        for total, of_one_copy, copies in totals:
            dist.all_reduce(total, group=of_one_copy)
            if self.is_distributed:
                dist.all_reduce(total, group=copies)
        return float((dense + sparse).sqrt())

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the weights with the gradients times ``scale``. Collective."""
        for share in self._shares:
            gradient = share.gradient.float().reshape(share.main.shape)
            share.main.grad = gradient if scale == 1.0 else gradient * scale
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the fp32 weights into the model's, on all data-parallel ranks. Collective."""
        for share in self._shares:
            if share.main.data_ptr() != share.weights.data_ptr():
                share.weights.copy_(share.main.view_as(share.weights))
        if self.is_distributed:
            for piece in self.pieces:
                piece.start_param_sync(force_sync=True)

    def tensors(self) -> Iterator[Tensor]:
        """Tensors that an update alone needs: fp32 weights where the model has another format, and the state."""
        for share in self._shares:
            if share.main.data_ptr() != share.weights.data_ptr():
                yield share.main.detach()
            yield from (v for v in self.torch.state.get(share.main, {}).values() if isinstance(v, Tensor) and v.dim())

    def buffers(self) -> Iterator[Tensor]:
        """Gradients of this rank's part of the model, several parameters in each tensor."""
        for piece in self.pieces:
            yield from (buffer.grad_data for buffer in piece.buffers + piece.expert_parallel_buffers)

    # ---- state by parameter -----------------------------------------------------------------------

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
        """Return tensors with the shape of their parameter, and other entries. Collective.

        The tensors are by kind, then by parameter: ``main``, and the optimizer's moments under their names. The other
        entries are those that all parameters have alike, such as the number of steps.
        """
        kinds: dict[str, list[Tensor]] = {"main": [share.main for share in self._shares]}
        other: dict[str, object] = {}
        for key in sorted({key for share in self._shares for key in self.torch.state.get(share.main, {})}):
            values = [self.torch.state[share.main][key] for share in self._shares]
            if all(
                isinstance(v, Tensor) and v.shape == s.main.shape for v, s in zip(values, self._shares, strict=True)
            ):
                kinds[key] = values
            else:
                other[key] = values[0]
        return {kind: self._by_parameter(values) for kind, values in kinds.items()}, other

    def _by_parameter(self, values: list[Tensor]) -> dict[str, Tensor]:
        states: dict[str, Tensor] = {}
        for share, value in zip(self._shares, values, strict=True):
            flat = value.detach().reshape(-1)
            if self.is_distributed:
                bucket = flat.new_empty(share.bucket_size)
                dist.all_gather_into_tensor(bucket, flat.contiguous(), group=share.group)
                flat = bucket
            for name, (first, end) in share.bounds.items():
                states[name] = flat[first:end].view(self.parameters[name].shape)
        return states

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, object]) -> None:
        """Restore what :meth:`state` returned; of kinds that are absent nothing changes. Collective."""
        for share in self._shares:
            if "main" in kinds:
                self._fill(share, share.main, kinds["main"])
            moments = {kind: torch.zeros_like(share.main) for kind in kinds if kind != "main"}
            for kind, value in moments.items():
                self._fill(share, value, kinds[kind])
            if moments or other:
                self.torch.state[share.main] = {**for_optimizer(self.torch, share.main, other), **moments}
        if "main" in kinds:
            self.publish()

    @staticmethod
    def _fill(share: _Share, value: Tensor, by_parameter: Mapping[str, Tensor]) -> None:
        flat = value.detach().view(-1)
        for name, part in share.ranges():
            count = part.end - part.first
            flat[part.first : part.end] = by_parameter[name].reshape(-1)[part.offset : part.offset + count]
