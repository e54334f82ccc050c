"""all_gather_data_proto over gloo, between two workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.protocol.batches import same
from verl.errors import SchemaError
from verl.protocol import DataProto, all_gather_data_proto

WORLD = 2


def rows_of(rank: int) -> DataProto:
    """Two rows on rank 0, one on rank 1; dtypes of different widths."""
    rows = 2 - rank
    return DataProto.from_dict(
        {
            "keep": torch.tensor([True, False])[:rows] ^ bool(rank),
            "ids": torch.arange(rows * 3).view(rows, 3) + 100 * rank,
            "log_probs": torch.full((rows,), 0.5 + rank, dtype=torch.bfloat16),
        },
        {"uid": [f"{rank}/{row}" for row in range(rows)], "n": np.arange(rows) + 10 * rank},
        {"global_steps": 3},
    )


def gather_on(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        check_gathering(rank)
    finally:
        dist.destroy_process_group()


def check_gathering(rank: int) -> None:
    expected = DataProto.concat([rows_of(0), rows_of(1)])
    data = rows_of(rank)
    assert all_gather_data_proto(data) is data
    assert same(data, expected)
    objects = rows_of(rank).select(batch_keys=[])
    assert same(all_gather_data_proto(objects, dist.group.WORLD), expected.select(batch_keys=[]))
    assert same(all_gather_data_proto(DataProto(meta_info={"x": 1})), DataProto(meta_info={"x": 1}))
    # every rank learns of what does not fit; none is left waiting
    for odd in (DataProto.from_dict({f"only_{rank}": torch.zeros(1)}), DataProto(meta_info={"rank": rank})):
        with pytest.raises(SchemaError, match=r"only_\d' is missing|'rank' is in both"):
            all_gather_data_proto(odd)


def test_every_rank_gets_all_rows(ray_cluster: None, tmp_path: Path):
    import ray

    worker = ray.remote(num_cpus=1)(gather_on)
    ray.get([worker.remote(rank, str(tmp_path)) for rank in range(WORLD)])
