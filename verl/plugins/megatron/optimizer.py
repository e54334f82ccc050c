"""The optimizer over megatron-core's gradient buffers: fp32 weights, their state divided over data-parallel ranks.

Any optimizer of ``optim.optimizer_impl`` whose steps treat elements one by one (Adam, SGD ...) may be used, because a
rank's share is a flat part of a buffer, not a matrix; and Muon, for which ranks exchange matrices
(:mod:`verl.plugins.megatron.matrices`).

With moments in bfloat16 or in host memory weights are updated a chunk at a time: its moments, and its fp32 weights if
the model has another format, are on the device in fp32 for its step alone. The step is that of the optimizer as it is.
So host memory changes no bit, and moments in bfloat16 are rounded once in a step, after the weights have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.checkpoint.shards import copied_to_cpu, for_optimizer
from verl.config import FSDPOptimizerConfig
from verl.plugins.megatron.library import parallel_state
from verl.plugins.megatron.matrices import BoxExchange, MatrixParameter
from verl.plugins.megatron.weights import ShardRegion
from verl.utils.pinned_memory import HostPieces
from verl.workers.engine.muon import MOMENTUM
from verl.workers.engine.optimizer import build_optimizer

CHUNK = 1 << 26
"""Elements that are updated together where state is stored in another way than it is computed with."""


@dataclass(frozen=True)
class _Range:
    """Position of a parameter, or of a stretch of it, in a part."""

    first: int
    """Index of the first element in the part."""
    end: int
    offset: int
    """Index of that element in the parameter."""


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a share, which is one tensor for the optimizer."""

    main: nn.Parameter
    """Weights in fp32, which the optimizer updates; the model's own if these are fp32."""
    weights: Tensor
    gradient: Tensor
    ranges: Mapping[str, _Range]
    """Positions of parameters in the stretch, by name."""
    matrix: str | None
    """The parameter, where Muon moves it; the stretch of it may be empty."""

    @property
    def has_copy(self) -> bool:
        """True if the fp32 weights are a copy of the model's."""
        return self.weights.dtype != torch.float32


@dataclass(frozen=True)
class _Share:
    """A stretch of weights whose state this rank has: one parameter, or its part of a bucket of several."""

    weights: Tensor
    """Flat, in megatron-core's buffer."""
    gradient: Tensor
    bounds: Mapping[str, tuple[int, int]]
    """First element and end of each parameter in the bucket that all data-parallel ranks share."""
    first: int
    """Place of the share in that bucket."""
    bucket_size: int
    group: dist.ProcessGroup
    """The ranks that have the other shares of the bucket."""

    def stretches(self, matrices: set[str], at_once: int | None) -> Iterator[tuple[int, int, str | None]]:
        """Cut the share: a stretch, possibly empty, for each matrix, others of at most ``at_once`` elements between."""
        end = self.first + self.weights.numel()
        matrix_bounds = sorted((*bounds, name) for name, bounds in self.bounds.items() if name in matrices)
        cursor = self.first
        for start, stop, name in (*matrix_bounds, (end, end, None)):
            start, stop = (min(max(bound, self.first), end) for bound in (start, stop))
            while cursor < start:
                cut = start if at_once is None else min(start, cursor + at_once)
                yield cursor, cut, None
                cursor = cut
            if name is not None:
                yield start, stop, name
                cursor = stop

    def part(self, begin: int, end: int, matrix: str | None) -> _Stretch:
        """Make the part between two places of the bucket; its fp32 weights are the model's own until it has others."""
        own_slice = slice(begin - self.first, end - self.first)
        ranges = {
            name: _Range(max(start, begin) - begin, min(stop, end) - begin, max(start, begin) - start)
            for name, (start, stop) in self.bounds.items()
            if max(start, begin) < min(stop, end)
        }
        weights = self.weights[own_slice]
        return _Stretch(nn.Parameter(weights), weights, self.gradient[own_slice], ranges, matrix)

    def rank_sizes(self, name: str) -> list[int]:
        """Elements of a parameter that each rank of the group has."""
        start, stop = self.bounds[name]
        size = self.weights.numel()
        return [
            max(0, min(stop, first + size) - max(start, first))
            for first in range(0, size * dist.get_world_size(self.group), size)
        ]


@dataclass(frozen=True)
class Matrices:
    """Facts about the model that Muon needs."""

    names: frozenset[str]
    """Transformers names of the weights that it moves (:func:`~verl.workers.engine.muon.hidden_matrices`)."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all weights, by that name."""
    regions: Sequence[ShardRegion]
    """Boxes of this rank."""


class MegatronOptimizer:
    """Optimizer of the pieces of a model of megatron-core. Collective to create.

    Args:
        pieces: ``DistributedDataParallel`` each, with its gradient buffers.
        config: class and settings.
        is_distributed: whether each data-parallel rank has the state of its part only.
        counted: parameters whose gradients this rank counts in the norm: one copy of each weight over all ranks that
            share a model.
        matrices: weights for Muon; ignored by others.
    """

    def __init__(
        self,
        pieces: Sequence[Any],
        config: FSDPOptimizerConfig,
        is_distributed: bool,
        counted: set[str],
        matrices: Matrices,
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
        self.muon = matrices.names if config.is_muon else frozenset()
        """Transformers names of the weights that Muon moves."""
        self._moments = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
        self._on_host: set[nn.Parameter] = set()
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._pieces = HostPieces(is_pinned=torch.cuda.is_initialized())
        shares = list(self._divided() if is_distributed else self._single())
        by_muon = {region.parameter for region in matrices.regions if region.name in self.muon} & self.parameters.keys()
        self._is_stored_apart = config.offload_fraction > 0 or any(dtype != "fp32" for dtype in self._moments.values())
        at_once = CHUNK if self._is_stored_apart else None
        self._shares = [
            (share, [share.part(*stretch) for stretch in share.stretches(by_muon, at_once)]) for share in shares
        ]
        self._parts = [part for _, parts in self._shares for part in parts]
        self._chunks = [self._parts] if at_once is None else list(self._in_chunks(at_once))
        self._make_main(config.offload_fraction)
        exchange = BoxExchange(self._matrix_parameters(matrices.regions), matrices.shapes) if self.muon else None
        matrix_parts = [part.main for part in self._parts if part.matrix is not None]
        self.torch = build_optimizer([part.main for part in self._parts], config, matrix_parts, exchange)
        """The optimizer of ``config``, over this rank's parts."""

    # ---- parts ------------------------------------------------------------------------------------

    def _single(self) -> Iterator[_Share]:
        for name, parameter in self.parameters.items():
            size = parameter.numel()
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            group = self.group if getattr(parameter, "allreduce", True) else self.expert_group
            yield _Share(parameter.detach().view(-1), gradient.view(-1), {name: (0, size)}, 0, size, group)

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
                weights, gradient = (data.view(-1).chunk(ranks)[rank] for data in (bucket.param_data, bucket.grad_data))
                yield _Share(weights, gradient, bounds, rank * (size // ranks), size, group)

    def _in_chunks(self, at_once: int) -> Iterator[list[_Stretch]]:
        """Put parts together; matrices in chunks that are the same on all ranks that share them."""
        order = {name: index for index, name in enumerate(self.parameters)}
        matrices = sorted((part for part in self._parts if part.matrix), key=lambda part: order[part.matrix or ""])
        without_muon = [part for part in self._parts if not part.matrix]
        for parts in (matrices, without_muon):
            chunk: list[_Stretch] = []
            size = 0
            for part in parts:
                numel = self.parameters[part.matrix].numel() if part.matrix else part.weights.numel()
                if chunk and size + numel > at_once:
                    yield chunk
                    chunk, size = [], 0
                chunk.append(part)
                size += numel
            if chunk:
                yield chunk

    def _make_main(self, fraction: float) -> None:
        """Make fp32 weights; chunks with about ``fraction`` of this rank's elements have their state in host memory."""
        total = sum(part.weights.numel() for part in self._parts)
        count = 0
        for chunk in self._chunks:
            for part in chunk:
                part.main.data = part.weights.float()
            count += sum(part.weights.numel() for part in chunk)
            if count <= fraction * total:
                self._on_host |= {part.main for part in chunk}
                self._rest(chunk, {})  # at once, because the device may not have memory for all of them

    def _matrix_parameters(self, regions: Sequence[ShardRegion]) -> dict[nn.Parameter, MatrixParameter]:
        parameters: dict[nn.Parameter, MatrixParameter] = {}
        for share, parts in self._shares:
            for part in parts:
                if (name := part.matrix) is None:
                    continue
                is_cut = self.is_distributed and dist.get_world_size(share.group) > 1
                parameters[part.main] = MatrixParameter(
                    name,
                    tuple(self.parameters[name].shape),
                    [region for region in regions if region.parameter == name],
                    share.rank_sizes(name) if is_cut else [part.weights.numel()],
                    share.group if is_cut else None,
                    parallel_state.get_expert_tensor_parallel_group()
                    if ".experts." in name
                    else parallel_state.get_tensor_model_parallel_group(),
                )
        return parameters

    # ---- update -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for piece in self.pieces:
            piece.zero_grad_buffer()
        self.torch.zero_grad(set_to_none=True)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of this rank by parameter, cut to its share."""
        # Of whole shares, because the norm's last bits would depend on where these are cut.
        for share, _ in self._shares:
            full = share.part(share.first, share.first + share.weights.numel(), None)
            yield from ((name, full.gradient[bounds.first : bounds.end]) for name, bounds in full.ranges.items())

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
        for total, model_ranks, copies in totals:
            dist.all_reduce(total, group=model_ranks)
            if self.is_distributed:
                dist.all_reduce(total, group=copies)
        return float((dense + sparse).sqrt())

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the weights with the gradients times ``scale``. Collective."""
        for chunk in self._chunks:
            self._wake(chunk)
            for part in chunk:
                gradient = part.gradient.float()
                part.main.grad = gradient if scale == 1.0 else gradient * scale
            self.torch.step()
            self.torch.zero_grad(set_to_none=True)
            self._publish(chunk)
            self._rest(chunk, self.torch.state)
        self._send()

    def _wake(self, chunk: Iterable[_Stretch]) -> None:
        """Bring the state of a chunk to the device in fp32."""
        for part in chunk if self._is_stored_apart else ():
            part.main.data = part.main.data.to(part.weights.device)
            state = self.torch.state.get(part.main, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(part.weights.device, torch.float32 if self._is_rounded(key) else None)

    def _rest(self, chunk: Iterable[_Stretch], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Store the state of a chunk in the format and the memory that it has between steps."""
        for part in chunk if self._is_stored_apart else ():
            is_on_host = part.main in self._on_host
            if is_on_host and part.has_copy:
                part.main.data = self._in_host_memory(part.main, "main", part.main.data)
            state = states.get(part.main, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    stored = value.bfloat16() if self._is_rounded(key) else value
                    state[key] = self._in_host_memory(part.main, key, stored) if is_on_host else stored

    def _is_rounded(self, kind: str) -> bool:
        """Return whether a moment is stored in bfloat16."""
        return self._moments.get(kind) == "bf16"

    def _in_host_memory(self, main: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """Copy a tensor to the memory that is kept for it."""
        if (main, key) not in self._host:
            self._host[main, key] = self._pieces.take_like(value)
        return self._host[main, key].copy_(value)

    def _publish(self, chunk: Iterable[_Stretch]) -> None:
        for part in chunk:
            if part.has_copy:
                part.weights.copy_(part.main)

    def _send(self) -> None:
        """Send this rank's weights to the other data-parallel ranks. Collective."""
        if self.is_distributed:
            for piece in self.pieces:
                piece.start_param_sync(force_sync=True)

    def tensors(self) -> Iterator[Tensor]:
        """Tensors on the device that an update alone needs: fp32 weights where the model has others, and the state."""
        for part in self._parts:
            if part.main in self._on_host:
                continue
            if part.has_copy:
                yield part.main.detach()
            yield from (v for v in self.torch.state.get(part.main, {}).values() if isinstance(v, Tensor) and v.dim())

    def buffers(self) -> Iterator[Tensor]:
        """Gradients of this rank's part of the model, several parameters in each tensor."""
        for piece in self.pieces:
            yield from (buffer.grad_data for buffer in piece.buffers + piece.expert_parallel_buffers)

    def state_bytes(self) -> int:
        """Bytes of fp32 weights and moments of this rank: one moment of what Muon moves, two of others as in Adam."""
        adam_bytes = sum(2 if stored == "bf16" else 4 for stored in self._moments.values())
        return sum(part.weights.numel() * (4 + (4 if part.matrix else adam_bytes)) for part in self._parts)

    # ---- state by parameter -----------------------------------------------------------------------

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
        """Return tensors with the shape of their parameter, and other entries. Collective.

        The tensors are by kind, then by parameter: ``main``, and the optimizer's moments under their names. The other
        entries are those that all parameters have alike, such as the number of steps.
        """
        kinds: set[str] = set()
        other: dict[str, object] = {}
        for part in self._parts:
            for key, value in self.torch.state.get(part.main, {}).items():
                if isinstance(value, Tensor) and value.shape == part.main.shape:
                    kinds.add(key)
                else:
                    other.setdefault(key, value)
        # A rank may have nothing but matrices, or none of them.
        rank_states: list[tuple[set[str], dict[str, object]]] = [(kinds, other)] * dist.get_world_size()
        dist.all_gather_object(rank_states, (kinds, copied_to_cpu(other)))
        merged = {key: value for _, entries in reversed(rank_states) for key, value in entries.items()} | other
        states = {
            kind: self._by_parameter(kind) for kind in ("main", *sorted(set().union(*(k for k, _ in rank_states))))
        }
        return states, merged

    def lacks(self, kind: str, name: str) -> bool:
        """Return whether a weight of Transformers has no tensor of a kind: Muon's momentum, or AdamW's moments."""
        return bool(self.muon) and kind != "main" and (name in self.muon) != (kind == MOMENTUM)

    def _by_parameter(self, kind: str) -> dict[str, Tensor]:
        states: dict[str, Tensor] = {}
        dtype = torch.bfloat16 if self._is_rounded(kind) else torch.float32
        for share, parts in self._shares:
            device = share.weights.device
            values = [part.main if kind == "main" else self.torch.state[part.main].get(kind) for part in parts]
            flats = [
                torch.zeros_like(part.weights, dtype=dtype) if value is None else value.detach().to(device)
                for part, value in zip(parts, values, strict=True)
            ]
            flat = flats[0] if len(flats) == 1 else torch.cat(flats)
            if self.is_distributed:
                bucket = flat.new_empty(share.bucket_size)
                dist.all_gather_into_tensor(bucket, flat.contiguous(), group=share.group)
                flat = bucket
            by_muon = {part.matrix for part in parts}
            for name, (first, end) in share.bounds.items():
                if not self.muon or kind == "main" or (name in by_muon) == (kind == MOMENTUM):
                    states[name] = flat[first:end].view(self.parameters[name].shape)
        return states

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, object]) -> None:
        """Restore what :meth:`state` returned; of kinds that are absent nothing changes. Collective."""
        for chunk in self._chunks:
            self._wake(chunk)
            for part in chunk:
                if "main" in kinds:
                    self._fill(part, part.main.data, kinds["main"])
                moment_kinds = [
                    k for k in kinds if k != "main" and (not self.muon or bool(part.matrix) == (k == MOMENTUM))
                ]
                moments = {kind: torch.zeros_like(part.main.data) for kind in moment_kinds}
                for kind, value in moments.items():
                    self._fill(part, value, kinds[kind])
                if moments or other:
                    entries = {} if part.matrix else for_optimizer(self.torch, part.main, other)
                    self.torch.state[part.main] = {**entries, **moments}
            self._publish(chunk)
            self._rest(chunk, self.torch.state)
        if "main" in kinds:
            self._send()

    @staticmethod
    def _fill(part: _Stretch, value: Tensor, by_parameter: Mapping[str, Tensor]) -> None:
        for name, bounds in part.ranges.items():
            count = bounds.end - bounds.first
            value[bounds.first : bounds.end] = by_parameter[name].reshape(-1)[bounds.offset : bounds.offset + count]
