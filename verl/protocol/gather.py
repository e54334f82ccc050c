"""Collect the batches of all ranks on every rank (all-gather)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.transport import WireTensorDict, deserialize_tensordict, serialize_tensordict


@dataclass(frozen=True)
class _Header:
    """Everything of a rank's batch but the tensors' values; needed to decode its bytes."""

    batch_size: tuple[int, ...]
    columns: dict[str, tuple[str, tuple[int, ...], int]]  # dtype, shape, bytes
    rest: DataProto

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.columns.values())


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> DataProto:
    """Replace ``data``, in place, by the concatenation of all ranks' batches in rank order. Collective.

    Ranks may hold different numbers of rows, but must hold the same columns, all on one device. Tensors travel as
    bytes, the rest pickled.

    Returns:
        ``data`` itself.

    Raises:
        SchemaError: the ranks' columns or ``meta_info`` do not fit together; raised on every rank.
    """
    header, payload = _pack(data)
    headers: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(headers, header, group=process_group)
    payloads = _all_gather_bytes(payload, [h.num_bytes for h in headers], process_group)
    gathered = DataProto.concat([_unpack(h, p) for h, p in zip(headers, payloads, strict=True)])
    if tensors := list(data.batch.values()):
        gathered = gathered.to(tensors[0].device)
    data.batch, data.non_tensor_batch, data.meta_info = gathered.batch, gathered.non_tensor_batch, gathered.meta_info
    return data


def _pack(data: DataProto) -> tuple[_Header, Tensor]:
    batch_size, _, columns = serialize_tensordict(data.batch)
    rest = DataProto(None, data.non_tensor_batch, data.meta_info)
    header = _Header(batch_size, {key: (dtype, shape, len(raw)) for key, (dtype, shape, raw) in columns.items()}, rest)
    parts = [torch.from_numpy(raw) for _, _, raw in columns.values()]
    return header, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _unpack(header: _Header, payload: Tensor) -> DataProto:
    sizes = [size for _, _, size in header.columns.values()]
    # Each column gets memory of its own, aligned for its dtype.
    raws = [raw.clone().numpy() for raw in payload.split(sizes)] if sizes else []
    columns = {
        key: (dtype, shape, raw) for (key, (dtype, shape, _)), raw in zip(header.columns.items(), raws, strict=True)
    }
    wire: WireTensorDict = (header.batch_size, None, columns)
    return DataProto(deserialize_tensordict(wire), header.rest.non_tensor_batch, header.rest.meta_info)


def _all_gather_bytes(payload: Tensor, sizes: list[int], process_group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather each rank's bytes on the CPU, padded to the longest in transit as collectives need equal sizes."""
    # NCCL transfers only tensors on the accelerator.
    device = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
    longest = max(sizes)
    padded = torch.nn.functional.pad(payload, (0, longest - len(payload))).to(device)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    if longest:
        dist.all_gather(received, padded, group=process_group)
    return [part[:size].cpu() for part, size in zip(received, sizes, strict=True)]
