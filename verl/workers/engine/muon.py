"""Muon for the matrices of hidden layers, with AdamW for all other weights, under FSDP2 or on one rank.

For a matrix W (A, B) with gradient G, momentum μ, learning rate η and weight decay λ
(https://kellerjordan.github.io/posts/muon; arXiv:2502.16982)::

    M ← μ M + (1 - μ) G
    U = μ M + (1 - μ) G with Nesterov's momentum, else M
    W ← (1 - η λ) W - η s O(U)

O(U) is U with its singular values brought close to 1 by five Newton-Schulz iterations, and s is 0.2 √max(A, B)
(``match_rms_adamw``) or √max(1, A / B) (``original``). ``torch.optim.Muon`` computes s O(U).

O needs the whole matrix, and FSDP2 gives each of N ranks some rows of it. So N matrices at a time are exchanged: rank r
receives all rows of the r-th, computes its update and returns their rows to all ranks. A rank computes one N-th of the
updates and holds one whole matrix at a time. Of experts that are stacked in one weight (E, A, B) each is a matrix;
FSDP2 divides the first dimension, so each rank has whole experts and exchanges nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from verl.utils.sharded_tensor import local_rows

MOMENTUM = "momentum_buffer"
"""Name of the only moment of a matrix, as in ``torch.optim.Muon``."""


def hidden_matrices(model: nn.Module, head: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights that Muon is for: matrices that are neither in an embedding nor in ``head``.

    Factors of adapters are such matrices. A weight of stacked experts (experts, A, B) is in the list; their stacked
    biases and their stacked adapters, which are (a, b) but no matrices, are not.
    """
    modules = [head, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    left_out = {id(parameter) for module in modules for parameter in module.parameters()}
    matrices: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        are_stacked = ".experts." in name and not re.search(r"\.experts\.\d+\.", name)
        is_matrix = parameter.dim() == (3 if are_stacked else 2) and min(parameter.shape[-2:]) > 1
        if parameter.requires_grad and is_matrix and id(parameter) not in left_out and "embed" not in name:
            matrices.append(parameter)
    return matrices


class MuonWithAdamW(Optimizer):
    """Muon for ``matrices``, AdamW for all other ``parameters``; every rank has the state of its rows.

    Args:
        parameters: all weights that are trained.
        matrices: those among them that Muon moves, (A, B), or (experts, A, B).
        muon: keyword arguments of ``torch.optim.Muon``.
        adamw: keyword arguments of ``torch.optim.AdamW``.

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
    ) -> None:
        by_muon = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in parameters if id(parameter) not in by_muon]
        checked = Muon([nn.Parameter(torch.zeros(1, 1))], **muon).defaults
        self._adamw = AdamW([{"params": others}], **adamw)
        super().__init__([{"params": list(matrices), **checked}, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all weights that have gradients. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, others = self.param_groups
        self._step_matrices(matrices)
        # Again at every step, because load_state_dict replaces both.
        self._adamw.param_groups, self._adamw.state = [others], self.state
        self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        of_ranks: dict[dist.ProcessGroup | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                if MOMENTUM not in self.state[parameter]:
                    self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
                of_ranks[_ranks_with_rows(parameter) if parameter.dim() == 2 else None].append(parameter)
        for ranks, parameters in of_ranks.items():
            at_once = 1 if ranks is None else dist.get_world_size(ranks)
            # Matrices of about one size together: the ranks compute one each, and wait for the largest.
            parameters.sort(key=lambda parameter: parameter.numel())
            for start in range(0, len(parameters), at_once):
                self._step_together(parameters[start : start + at_once], group, ranks)

    def _step_together(
        self, parameters: Sequence[nn.Parameter], group: dict[str, Any], ranks: dist.ProcessGroup | None
    ) -> None:
        directions = [self._direction(parameter, group) for parameter in parameters]
        if ranks is None:
            changes = [_change(direction, group) for direction in directions]
        else:
            shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters]
            changes = _exchanged_changes(directions, shapes, group, ranks)
        for parameter, change in zip(parameters, changes, strict=True):
            weight, _ = local_rows(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(weight.device))

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's rows of U in fp32, where collectives and products are computed."""
        assert parameter.grad is not None
        (gradient, _), (moment, _) = local_rows(parameter.grad), local_rows(self.state[parameter][MOMENTUM])
        moment.lerp_(gradient.to(moment.dtype), 1 - group["momentum"])
        direction = gradient.lerp(moment, group["momentum"]) if group["nesterov"] else moment
        # With offload_policy the parameters are in host memory.
        return direction.to(parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None, torch.float)


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
    for parameter, of_one in zip(parameters, directions.unbind(), strict=True):
        parameter.grad = of_one
    shared = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    Muon(parameters, weight_decay=0.0, momentum=0.0, nesterov=False, **shared).step()
    return change


def _exchanged_changes(
    directions: Sequence[Tensor], shapes: Sequence[tuple[int, int]], group: dict[str, Any], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Return this rank's rows of -η s O(U) of at most as many matrices as there are ranks. Collective.

    Args:
        directions: this rank's rows of each U.
        shapes: (A, B) of each.
        group: settings.
        ranks: FSDP2 gave each of them ceil(A / ranks) rows, and fewer or none to the last.
    """
    count, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    sizes = [direction.numel() for direction in directions] + [0] * (count - len(directions))
    sent = torch.cat([direction.flatten() for direction in directions])
    rows, columns = shapes[rank] if rank < len(shapes) else (0, 0)
    per_rank = -(-rows // count)
    taken = [max(0, min(per_rank, rows - index * per_rank)) * columns for index in range(count)]
    whole = sent.new_empty(rows * columns)
    dist.all_to_all_single(whole, sent, taken, sizes, group=ranks)
    if rows:
        whole = _change(whole.view(rows, columns), group).flatten()
    dist.all_to_all_single(sent, whole, sizes, taken, group=ranks)
    parts = sent.split(sizes[: len(directions)])
    return [part.view_as(direction) for part, direction in zip(parts, directions, strict=True)]
