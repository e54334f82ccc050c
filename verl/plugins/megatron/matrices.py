"""Whole matrices for Muon, of which Megatron's ranks hold parts (:mod:`verl.workers.engine.muon`).

A matrix is one of Transformers: queries, keys and values have one each, though megatron-core keeps them in one
parameter; of experts each has its own. A rank holds a box of it in a parameter, and of this parameter, with a
distributed optimizer, the stretch that is in its share of a bucket. So D · T parameters at a time are exchanged twice:

1. the D data-parallel ranks send their stretches, so that the d-th has T whole parameters;
2. the T tensor-parallel ranks send the boxes of the matrices in these, so that the t-th has every T-th matrix whole.

It computes their updates, which go back the same way. A matrix that all tensor-parallel ranks have is computed by each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.plugins.megatron.weights import Place
from verl.workers.engine.muon import MatrixExchange


@dataclass(frozen=True)
class MatrixParameter:
    """A parameter of megatron-core that holds boxes of matrices."""

    name: str
    shape: tuple[int, ...]
    """On each tensor-parallel rank."""
    places: Sequence[Place]
    stretches: Sequence[int]
    """Elements that each rank of ``copies`` holds, one stretch after the other."""
    copies: dist.ProcessGroup | None
    """The data-parallel ranks, where each holds a stretch; None where each holds the whole parameter."""
    divided_by: dist.ProcessGroup
    """The tensor-parallel ranks."""


@dataclass(frozen=True)
class _Matrix:
    """The boxes of one matrix on this rank, and where those of the other tensor-parallel ranks are."""

    shape: tuple[int, int]
    places: Sequence[Place]
    starts: Sequence[Sequence[tuple[int, int]]]
    """Index of the first row and column of each box, by rank."""

    @property
    def is_divided(self) -> bool:
        return any(starts != self.starts[0] for starts in self.starts)

    @property
    def numel(self) -> int:
        """Elements of a rank's boxes."""
        return sum(self._counts())

    def read(self, tensor: Tensor) -> Tensor:
        """Return this rank's boxes, flat, out of a tensor of the parameter's shape."""
        return torch.cat([place.read(tensor).flatten() for place in self.places])

    def write(self, tensor: Tensor, boxes: Tensor) -> None:
        """Copy this rank's boxes into a tensor of the parameter's shape."""
        for place, box in zip(self.places, boxes.split(self._counts()), strict=True):
            place.write(tensor, box)

    def whole(self, of_ranks: Sequence[Tensor]) -> Tensor:
        """Put the boxes of ``of_ranks``, each flat, together."""
        whole = of_ranks[0].new_empty(self.shape)
        for part, box in self._parts(whole, of_ranks):
            part.copy_(box.view_as(part))
        return whole

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Return the boxes of each rank, flat; the inverse of :meth:`whole`."""
        of_ranks = [whole.new_empty(self.numel) for _ in range(ranks)]
        for part, box in self._parts(whole, of_ranks):
            box.copy_(part.flatten())
        return of_ranks

    def _parts(self, whole: Tensor, of_ranks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for boxes, starts in zip(of_ranks, self.starts, strict=False):  # of one rank where all have all
            for box, (row, column), place in zip(boxes.split(self._counts()), starts, self.places, strict=True):
                rows, columns = place.size[-2:]
                yield whole[row : row + rows, column : column + columns], box

    def _counts(self) -> list[int]:
        return [place.size[-2] * place.size[-1] for place in self.places]


class BoxExchange(MatrixExchange):
    """The exchange of Megatron's ranks. Collective to create.

    Args:
        parameters: that hold matrices, by the part of each that this rank's optimizer has, which may be empty.
        shapes: of all weights, by their Transformers name.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, MatrixParameter], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._parameters = parameters
        self._matrices: dict[str, list[_Matrix]] = {}
        mine = {one.name: [(place.name, place.start) for place in one.places] for one in parameters.values()}
        of_ranks: dict[dist.ProcessGroup, list[dict[str, list[tuple[str, tuple[int, ...]]]]]] = {}
        for one in parameters.values():
            if one.divided_by not in of_ranks:
                of_ranks[one.divided_by] = [{}] * dist.get_world_size(one.divided_by)
                dist.all_gather_object(of_ranks[one.divided_by], mine, group=one.divided_by)
            boxes = [of_rank[one.name] for of_rank in of_ranks[one.divided_by]]
            indices: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
            for index, place in enumerate(one.places):
                indices[place.name, place.start[:-2]].append(index)
            self._matrices[one.name] = [
                _Matrix(
                    (shapes[name][-2], shapes[name][-1]),
                    [one.places[index] for index in of_matrix],
                    [[(boxes_of[i][1][-2], boxes_of[i][1][-1]) for i in of_matrix] for boxes_of in boxes],
                )
                for (name, _), of_matrix in indices.items()
            ]

    def changes(
        self,
        parameters: Sequence[nn.Parameter],
        direction: Callable[[nn.Parameter], Tensor],
        change: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See :meth:`MatrixExchange.changes`."""
        held = {self._parameters[parameter].name: parameter for parameter in parameters}
        alike: dict[tuple[dist.ProcessGroup | None, dist.ProcessGroup], list[MatrixParameter]] = defaultdict(list)
        for parameter in parameters:
            one = self._parameters[parameter]
            alike[one.copies, one.divided_by].append(one)
        for (copies, divided_by), of_groups in alike.items():
            ranks = dist.get_world_size(divided_by) * (1 if copies is None else dist.get_world_size(copies))
            # Matrices of about one size together: the ranks compute one each, and wait for the largest.
            of_groups.sort(key=lambda one: (sum(one.stretches), one.name))
            for first in range(0, len(of_groups), ranks):
                together = of_groups[first : first + ranks]
                directions = [direction(held[one.name]).flatten() for one in together]
                for one, part in zip(together, self._exchanged(together, directions, copies, change), strict=True):
                    yield held[one.name], part.view_as(held[one.name])

    def _exchanged(
        self,
        together: Sequence[MatrixParameter],
        directions: list[Tensor],
        copies: dist.ProcessGroup | None,
        change: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Return this rank's stretches of the changes, from those of the directions. Collective."""
        if copies is None:
            tensors = [flat.view(one.shape).clone() for one, flat in zip(together, directions, strict=True)]
            self._change(list(zip(together, tensors, strict=True)), change)
            return tensors
        ranks, rank = dist.get_world_size(copies), dist.get_rank(copies)
        # The d-th of D ranks has every D-th parameter, beginning with the d-th.
        order = [index for other in range(ranks) for index in range(other, len(together), ranks)]
        sent = torch.cat([directions[index] for index in order])
        sizes = [sum(len(directions[index]) for index in range(other, len(together), ranks)) for other in range(ranks)]
        whole = together[rank::ranks]
        taken = [sum(one.stretches[other] for one in whole) for other in range(ranks)]
        received = sent.new_empty(sum(taken))
        dist.all_to_all_single(received, sent, taken, sizes, group=copies)
        stretches = [
            of_rank.split([one.stretches[other] for one in whole])
            for other, of_rank in enumerate(received.split(taken))
        ]
        tensors = [
            torch.cat(of_one).view(one.shape) for one, of_one in zip(whole, zip(*stretches, strict=True), strict=True)
        ]
        self._change(list(zip(whole, tensors, strict=True)), change)
        parts = [tensor.flatten().split(list(one.stretches)) for one, tensor in zip(whole, tensors, strict=True)]
        if parts:
            torch.cat([part[other] for other in range(ranks) for part in parts], out=received)
        dist.all_to_all_single(sent, received, sizes, taken, group=copies)
        for index, part in zip(order, sent.split([len(directions[index]) for index in order]), strict=True):
            directions[index] = part
        return directions

    def _change(self, parameters: Sequence[tuple[MatrixParameter, Tensor]], change: Callable[[Tensor], Tensor]) -> None:
        """Replace U by its change in each tensor, which has the parameter's shape. Collective."""
        if not parameters:
            return
        group = parameters[0][0].divided_by
        matrices = [(matrix, tensor) for one, tensor in parameters for matrix in self._matrices[one.name]]
        for matrix, tensor in matrices:
            if not matrix.is_divided:
                matrix.write(tensor, matrix.cut(change(matrix.whole([matrix.read(tensor)])), 1)[0])
        divided = [(matrix, tensor) for matrix, tensor in matrices if matrix.is_divided]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        for first in range(0, len(divided), ranks):
            together = divided[first : first + ranks]
            sizes = [matrix.numel for matrix, _ in together] + [0] * (ranks - len(together))
            sent = torch.cat([matrix.read(tensor) for matrix, tensor in together])
            mine = together[rank][0] if rank < len(together) else None
            received = sent.new_empty(ranks * (mine.numel if mine else 0))
            dist.all_to_all_single(received, sent, None, sizes, group=group)
            if mine is not None:
                received = torch.cat(mine.cut(change(mine.whole(received.chunk(ranks))), ranks))
            dist.all_to_all_single(sent, received, sizes, None, group=group)
            for (matrix, tensor), boxes in zip(together, sent.split(sizes[: len(together)]), strict=True):
                matrix.write(tensor, boxes)
