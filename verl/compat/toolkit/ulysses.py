"""Sequence parallelism around workers that users write, which compute with :mod:`verl.utils.ulysses`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch.distributed.device_mesh import DeviceMesh

from verl.protocol import DataProto, all_gather_data_proto
from verl.utils.ulysses import (
    Group,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
)


class FSDPUlyssesShardingManager:
    """Context in which the ranks of one dimension of a mesh share sequences, and the exchange of their rows.

    verl's own engines need neither: ``ulysses_sequence_parallel_size`` gives the ranks that share sequences the same
    rows. It is for workers whose ranks get rows of their own and exchange them before they compute::

        with manager:
            data = manager.preprocess_data(data)       # the rows of all ranks that share sequences
            output = forward(data)                     # with the functions of verl.utils.ulysses
            output = manager.postprocess_data(output)  # this rank's rows

    Args:
        device_mesh: a mesh with the dimension ``sp``; None if sequences are not divided.
    """

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        self._group: Group = None if device_mesh is None else device_mesh.get_group("sp")
        self._outer: Group = None

    def __enter__(self) -> Self:
        if self._group is not None:
            self._outer = get_ulysses_sequence_parallel_group()
            set_ulysses_sequence_parallel_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is not None:
            set_ulysses_sequence_parallel_group(self._outer)

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Concatenate, in place, the rows of the ranks that share sequences, in rank order. Collective."""
        return data if self._group is None else all_gather_data_proto(data, self._group)

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Return this rank's rows of a batch with those of all ranks that share sequences."""
        if self._group is None:
            return data
        parts = data.chunk(get_ulysses_sequence_parallel_world_size(self._group))
        return parts[get_ulysses_sequence_parallel_rank(self._group)]
