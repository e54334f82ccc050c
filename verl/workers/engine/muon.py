"""Muon for the matrices of hidden layers, with AdamW for all other weights.

For a matrix W (A, B) with gradient G, momentum μ, learning rate η and weight decay λ
(https://kellerjordan.github.io/posts/muon; arXiv:2502.16982)::

    M ← μ M + (1 - μ) G
    U = μ M + (1 - μ) G with Nesterov's momentum, else M
    W ← (1 - η λ) W - η s O(U)

O(U) is U with its singular values brought close to 1 by five Newton-Schulz iterations, and s is 0.2 √max(A, B)
(``match_rms_adamw``) or √max(1, A / B) (``original``). ``torch.optim.Muon`` computes s O(U).

O needs the whole matrix, of which N ranks hold a part each (:class:`MatrixExchange`). So N matrices at a time are
exchanged: rank r receives all of the r-th, computes its update and returns their parts to all ranks. A rank computes
one N-th of the updates and holds one whole matrix at a time.

FSDP2 gives each rank some rows (:class:`RowExchange`). Of experts that are stacked in one weight (E, A, B) each is a
matrix; FSDP2 divides the first dimension, so each rank has whole experts and exchanges nothing. Megatron's parts are
those of :mod:`verl.plugins.megatron.matrices`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from verl.utils.sharded_tensor import local_rows

MOMENTUM = "momentum_buffer"
"""Name of the only moment of a matrix, as in ``torch.optim.Muon``."""


def hidden_matrices(model: nn.Module, head: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained weights that Muon is for: matrices that are neither in an embedding nor in ``head``.

    Factors of adapters are such matrices. A weight of stacked experts (experts, A, B) is among them; their stacked
    biases and their stacked adapters, which are (a, b) but no matrices, are not.
    """
    modules = [head, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    left_out = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in left_out and is_hidden_matrix(name, parameter.shape)
    }


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a weight outside of embeddings and heads is a matrix, or matrices of experts (experts, A, B)."""
    are_stacked = ".experts." in name and not re.search(r"\.experts\.\d+\.", name)
    return len(shape) == (3 if are_stacked else 2) and min(shape[-2:]) > 1 and "embed" not in name


class MatrixExchange(ABC):
    """Exchange between ranks that hold parts of matrices, by which they compute updates of full matrices."""

    @abstractmethod
    def changes(
        self,
        parameters: Sequence[nn.Parameter],
        direction: Callable[[nn.Parameter], Tensor],
        change: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Iterate over ``parameters``, in any order, each with the change of this rank's part. Collective.

        Args:
            parameters: this rank's parts of matrices; the same matrices on all ranks that share them.
            direction: updates the momentum of a parameter and returns this rank's part of U in fp32.
            change: returns -η s O(U) of a whole U (A, B), or of each of several (n, A, B).
        """


class MuonWithAdamW(Optimizer):
    """Muon for ``matrices``, AdamW for all other ``parameters``; every rank has the state of its parts.

    Args:
        parameters: all weights that are trained.
        matrices: those among them that Muon moves: (A, B), (experts, A, B), or parts of them that ``exchange`` knows.
        muon: keyword arguments of ``torch.optim.Muon``.
        adamw: keyword arguments of ``torch.optim.AdamW``.
        exchange: how whole matrices are computed.

    Raises:
        TypeError: an argument is unknown.
        ValueError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        matrices: Collection[nn.Parameter],
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
        exchange: MatrixExchange,
    ) -> None:
        by_muon = {id(matrix) for matrix in matrices}
        without_muon = [parameter for parameter in parameters if id(parameter) not in by_muon]
        checked = Muon([nn.Parameter(torch.zeros(1, 1))], **muon).defaults
        self._adamw = AdamW([{"params": without_muon}], **adamw)
        self._exchange = exchange
        super().__init__([{"params": list(matrices), **checked}, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all weights that have gradients. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, without_muon = self.param_groups
        self._step_matrices(matrices)
        # Again at every step, because load_state_dict replaces both.
        self._adamw.param_groups, self._adamw.state = [without_muon], self.state
        self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if MOMENTUM not in self.state[parameter]:
                self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
        changes = self._exchange.changes(
            parameters, lambda parameter: self._direction(parameter, group), lambda matrix: _change(matrix, group)
        )
        for parameter, change in changes:
            weight, _ = local_rows(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(weight.device))

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's part of U in fp32, where collectives and products are computed."""
        assert parameter.grad is not None
        (gradient, _), (moment, _) = local_rows(parameter.grad), local_rows(self.state[parameter][MOMENTUM])
        moment.lerp_(gradient.to(moment.dtype), 1 - group["momentum"])
        direction = gradient.lerp(moment, group["momentum"]) if group["nesterov"] else moment
        # With offload_policy the parameters are in host memory.
        return direction.to(parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None, torch.float)


class RowExchange(MatrixExchange):
    """The exchange of FSDP2's ranks, which hold rows of a matrix, and of one rank, which has whole ones."""

    def changes(
        self,
        parameters: Sequence[nn.Parameter],
        direction: Callable[[nn.Parameter], Tensor],
        change: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See :meth:`MatrixExchange.changes`."""
        by_group: dict[dist.ProcessGroup | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_group[_ranks_with_rows(parameter) if parameter.dim() == 2 else None].append(parameter)
        for ranks, held in by_group.items():
            at_once = 1 if ranks is None else dist.get_world_size(ranks)
            # Matrices of about one size together: the ranks compute one each, and wait for the largest.
            held.sort(key=lambda parameter: parameter.numel())
            for start in range(0, len(held), at_once):
                batch = held[start : start + at_once]
                directions = [direction(parameter) for parameter in batch]
                if ranks is None:
                    parts = [change(matrix) for matrix in directions]
                else:
                    shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in batch]
                    parts = _exchanged_changes(directions, shapes, change, ranks)
                yield from zip(batch, parts, strict=True)


def _ranks_with_rows(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that together have all rows of a weight; None if each has all."""
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard() and parameter.device_mesh.size(dimension) > 1:
                return parameter.device_mesh.get_group(dimension)
    return None


def _change(direction: Tensor, group: dict[str, Any]) -> Tensor:
    """Return -η s O(U) of U (A, B), or of each of several (n, A, B)."""
    change = torch.zeros_like(direction)
    stacked, directions = change.view(-1, *change.shape[-2:]), direction.view(-1, *change.shape[-2:])
    parameters = [nn.Parameter(matrix) for matrix in stacked.unbind()]
    if not parameters:  # a rank without experts
        return change
    for parameter, matrix_direction in zip(parameters, directions.unbind(), strict=True):
        parameter.grad = matrix_direction
    shared = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    Muon(parameters, weight_decay=0.0, momentum=0.0, nesterov=False, **shared).step()
    return change


def _exchanged_changes(
    directions: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    change: Callable[[Tensor], Tensor],
    ranks: dist.ProcessGroup,
) -> list[Tensor]:
    """Return this rank's rows of -η s O(U) of at most as many matrices as there are ranks. Collective.

    Args:
        directions: this rank's rows of each U.
        shapes: (A, B) of each.
        change: computes it of a whole U.
        ranks: FSDP2 gave each of them ceil(A / ranks) rows, and fewer or none to the last.
    """
    count, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    sizes = [direction.numel() for direction in directions] + [0] * (count - len(directions))
    sent = torch.cat([direction.flatten() for direction in directions])
    rows, columns = shapes[rank] if rank < len(shapes) else (0, 0)
    per_rank = -(-rows // count)
    received = [max(0, min(per_rank, rows - index * per_rank)) * columns for index in range(count)]
    matrix = sent.new_empty(rows * columns)
    dist.all_to_all_single(matrix, sent, received, sizes, group=ranks)
    if rows:
        matrix = change(matrix.view(rows, columns)).flatten()
    dist.all_to_all_single(sent, matrix, sizes, received, group=ranks)
    parts = sent.split(sizes[: len(directions)])
    return [part.view_as(direction) for part, direction in zip(parts, directions, strict=True)]
