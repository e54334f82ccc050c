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

from verl.plugins.megatron.weights import ShardRegion
from verl.workers.engine.muon import MatrixExchange


@dataclass(frozen=True)
class MatrixParameter:
    """A parameter of megatron-core that holds boxes of matrices."""

    name: str
    shape: tuple[int, ...]
    """Shape on each tensor-parallel rank."""
    regions: Sequence[ShardRegion]
    stretches: Sequence[int]
    """Elements that each rank of ``copies`` holds, one stretch after the other."""
    copies: dist.ProcessGroup | None
    """The data-parallel ranks, where each holds a stretch; None where each holds the whole parameter."""
    divided_by: dist.ProcessGroup
    """The tensor-parallel ranks."""


@dataclass(frozen=True)
class _Matrix:
    """The boxes of one matrix on this rank, and the positions of other tensor-parallel ranks' boxes."""

    shape: tuple[int, int]
    regions: Sequence[ShardRegion]
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
        return torch.cat([region.read(tensor).flatten() for region in self.regions])

    def write(self, tensor: Tensor, boxes: Tensor) -> None:
        """Copy this rank's boxes into a tensor of the parameter's shape."""
        for region, box in zip(self.regions, boxes.split(self._counts()), strict=True):
            region.write(tensor, box)

    def join(self, boxes: Sequence[Tensor]) -> Tensor:
        """Assemble the matrix from the boxes of the ranks, each flat."""
        matrix = boxes[0].new_empty(self.shape)
        for part, box in self._parts(matrix, boxes):
            part.copy_(box.view_as(part))
        return matrix

    def cut(self, matrix: Tensor, ranks: int) -> list[Tensor]:
        """Return the boxes of each rank, flat; the inverse of :meth:`join`."""
        boxes = [matrix.new_empty(self.numel) for _ in range(ranks)]
        for part, box in self._parts(matrix, boxes):
            box.copy_(part.flatten())
        return boxes

    def _parts(self, matrix: Tensor, boxes: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for flat, starts in zip(boxes, self.starts, strict=False):  # of one rank where all have all
            for box, (row, column), region in zip(flat.split(self._counts()), starts, self.regions, strict=True):
                rows, columns = region.size[-2:]
                yield matrix[row : row + rows, column : column + columns], box

    def _counts(self) -> list[int]:
        return [region.size[-2] * region.size[-1] for region in self.regions]


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
        mine = {
            parameter.name: [(region.name, region.start) for region in parameter.regions]
            for parameter in parameters.values()
        }
        by_group: dict[dist.ProcessGroup, list[dict[str, list[tuple[str, tuple[int, ...]]]]]] = {}
        for parameter in parameters.values():
            if parameter.divided_by not in by_group:
                by_group[parameter.divided_by] = [{}] * dist.get_world_size(parameter.divided_by)
                dist.all_gather_object(by_group[parameter.divided_by], mine, group=parameter.divided_by)
            boxes = [rank_boxes[parameter.name] for rank_boxes in by_group[parameter.divided_by]]
            indices: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
            for index, region in enumerate(parameter.regions):
                indices[region.name, region.start[:-2]].append(index)
            self._matrices[parameter.name] = [
                _Matrix(
                    (shapes[name][-2], shapes[name][-1]),
                    [parameter.regions[index] for index in region_indices],
                    [[(boxes_of[i][1][-2], boxes_of[i][1][-1]) for i in region_indices] for boxes_of in boxes],
                )
                for (name, _), region_indices in indices.items()
            ]

    def changes(
        self,
        parameters: Sequence[nn.Parameter],
        direction: Callable[[nn.Parameter], Tensor],
        change: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See :meth:`MatrixExchange.changes`."""
        held = {self._parameters[parameter].name: parameter for parameter in parameters}
        by_groups: dict[tuple[dist.ProcessGroup | None, dist.ProcessGroup], list[MatrixParameter]] = defaultdict(list)
        for parameter in parameters:
            matrix = self._parameters[parameter]
            by_groups[matrix.copies, matrix.divided_by].append(matrix)
        for (copies, divided_by), group_matrices in by_groups.items():
            ranks = dist.get_world_size(divided_by) * (1 if copies is None else dist.get_world_size(copies))
            # Matrices of about one size together: the ranks compute one each, and wait for the largest.
            group_matrices.sort(key=lambda matrix: (sum(matrix.stretches), matrix.name))
            for first in range(0, len(group_matrices), ranks):
                batch = group_matrices[first : first + ranks]
                directions = [direction(held[matrix.name]).flatten() for matrix in batch]
                for matrix, part in zip(batch, self._exchanged(batch, directions, copies, change), strict=True):
                    yield held[matrix.name], part.view_as(held[matrix.name])

    def _exchanged(
        self,
        parameters: Sequence[MatrixParameter],
        directions: list[Tensor],
        copies: dist.ProcessGroup | None,
        change: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Return this rank's stretches of the changes, from those of the directions. Collective."""
        if copies is None:
            tensors = [flat.view(matrix.shape).clone() for matrix, flat in zip(parameters, directions, strict=True)]
            self._change(list(zip(parameters, tensors, strict=True)), change)
            return tensors
        ranks, rank = dist.get_world_size(copies), dist.get_rank(copies)
        # The d-th of D ranks has every D-th parameter, beginning with the d-th.
        order = [index for other in range(ranks) for index in range(other, len(parameters), ranks)]
        sent = torch.cat([directions[index] for index in order])
        sizes = [
            sum(len(directions[index]) for index in range(other, len(parameters), ranks)) for other in range(ranks)
        ]
        own_matrices = parameters[rank::ranks]
        received_sizes = [sum(matrix.stretches[other] for matrix in own_matrices) for other in range(ranks)]
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sizes, group=copies)
        stretches = [
            rank_part.split([matrix.stretches[other] for matrix in own_matrices])
            for other, rank_part in enumerate(received.split(received_sizes))
        ]
        tensors = [
            torch.cat(pieces).view(matrix.shape)
            for matrix, pieces in zip(own_matrices, zip(*stretches, strict=True), strict=True)
        ]
        self._change(list(zip(own_matrices, tensors, strict=True)), change)
        parts = [
            tensor.flatten().split(list(matrix.stretches)) for matrix, tensor in zip(own_matrices, tensors, strict=True)
        ]
        if parts:
            torch.cat([part[other] for other in range(ranks) for part in parts], out=received)
        dist.all_to_all_single(sent, received, sizes, received_sizes, group=copies)
        for index, part in zip(order, sent.split([len(directions[index]) for index in order]), strict=True):
            directions[index] = part
        return directions

    def _change(self, parameters: Sequence[tuple[MatrixParameter, Tensor]], change: Callable[[Tensor], Tensor]) -> None:
        """Replace U by its change in each tensor, which has the parameter's shape. Collective."""
        if not parameters:
            return
        group = parameters[0][0].divided_by
        matrices = [(matrix, tensor) for parameter, tensor in parameters for matrix in self._matrices[parameter.name]]
        for matrix, tensor in matrices:
            if not matrix.is_divided:
                matrix.write(tensor, matrix.cut(change(matrix.join([matrix.read(tensor)])), 1)[0])
        divided = [(matrix, tensor) for matrix, tensor in matrices if matrix.is_divided]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        for first in range(0, len(divided), ranks):
            batch = divided[first : first + ranks]
            sizes = [matrix.numel for matrix, _ in batch] + [0] * (ranks - len(batch))
            sent = torch.cat([matrix.read(tensor) for matrix, tensor in batch])
            mine = batch[rank][0] if rank < len(batch) else None
            received = sent.new_empty(ranks * (mine.numel if mine else 0))
            dist.all_to_all_single(received, sent, None, sizes, group=group)
            if mine is not None:
                received = torch.cat(mine.cut(change(mine.join(received.chunk(ranks))), ranks))
            dist.all_to_all_single(sent, received, sizes, None, group=group)
            for (matrix, tensor), boxes in zip(batch, sent.split(sizes[: len(batch)]), strict=True):
                matrix.write(tensor, boxes)
