"""Ranks on one machine exchange through memory: FSDP's collectives against gloo's, and whole weights."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.workers.support import make_engine, run_ranks
from verl.backends.cpu.collectives import Exchange, FrozenWeights, SharedAllGather, SharedReduceScatter
from verl.backends.cpu.shared_memory import shared_memory
from verl.backends.cpu.whole_weights import WholeWeights
from verl.testing.models import tiny_model_dir


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count)).to(dtype)


# ---- three ranks and slots of 64 bytes: 16 numbers in fp32, 32 in bf16


def collectives(rank: int, world_size: int, folder: Path) -> None:
    memory = shared_memory(2 * world_size * 64, world())
    assert memory is not None
    assert memory.tolist() == [0] * (2 * world_size * 64)
    dist.barrier()
    exchange = Exchange(memory, world())
    frozen = FrozenWeights(world(), keeps_copy=True)
    gather, scatter = SharedAllGather(exchange, frozen), SharedReduceScatter(exchange)
    for count in (1, 15, 16, 17, 50, 0, 33):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            mine = numbers(rank, count, torch.float32).mul(40).to(dtype)
            expected = torch.cat([numbers(r, count, torch.float32).mul(40).to(dtype) for r in range(world_size)])
            found = gather.allocate((world_size * count,), dtype=dtype, device=torch.device("cpu"))
            gather(found, mine, world())
            assert torch.equal(found, expected)
            found.zero_()
            own = found[rank * count : (rank + 1) * count]
            own.copy_(mine)
            gather(found, own, world())  # as FSDP calls it
            assert torch.equal(found, expected)
        for dtype in (torch.float32, torch.bfloat16):
            parts = [numbers(r, world_size * count, dtype).view(world_size, count) for r in range(world_size)]
            total = parts[0][rank] + parts[1][rank] + parts[2][rank]
            given = parts[rank].flatten()
            found = scatter.allocate((count,), dtype=dtype, device=torch.device("cpu"))
            scatter(found, given, world(), dist.ReduceOp.SUM)
            assert torch.equal(found, total)
            scatter(found, given, world(), dist.ReduceOp.AVG)
            assert torch.equal(found, total / 3)
            assert torch.equal(given, parts[rank].flatten())
    with pytest.raises(ValueError, match="summed or averaged"):
        scatter(torch.zeros(1), torch.zeros(3), world(), dist.ReduceOp.MAX)
    frozen_periods(rank, world_size, exchange)
    if os.geteuid() == 0:
        os.seteuid(65534 if rank == 1 else 0)  # rank 1 may not look into the others' files
        try:
            assert shared_memory(64, world()) is None
        finally:
            os.seteuid(0)


def frozen_periods(rank: int, world_size: int, exchange: Exchange) -> None:
    """What was published in one period is read in all of it, by a rank that comes late too, and never in the next."""
    for keeps_copy in (True, False):
        frozen = FrozenWeights(world(), keeps_copy)
        gather = SharedAllGather(exchange, frozen)
        found = torch.zeros(world_size * 40)
        for version in range(4):
            expected = torch.cat([numbers(r, 40, torch.float32) + version for r in range(world_size)])
            with frozen():
                for _ in range(3):
                    gather(found.zero_(), numbers(rank, 40, torch.float32) + version, world())
                    assert torch.equal(found, expected)
                    if rank == version % world_size:
                        time.sleep(0.02)
            gather(found.zero_(), torch.full((40,), float(rank)), world())  # weights may have changed
            assert found.tolist() == [0] * 40 + [1] * 40 + [2] * 40


def test_collectives_through_memory_are_those_of_three_ranks(tmp_path: Path) -> None:
    run_ranks(collectives, 3, tmp_path)


# ---- whole weights of a sharded model


def weights(rank: int, world_size: int, folder: Path, path: str) -> None:
    engine = make_engine(path)
    group = engine.mesh.get_group("shard")
    expected = {name: tensor.clone() for name, tensor in WholeWeights(engine.model)}  # through gloo
    lent = dict(engine.get_per_tensor_param())
    assert list(lent) == [name for name, _ in engine.model.named_parameters()] == list(expected)
    assert all(torch.equal(lent[name], tensor) for name, tensor in expected.items())
    # One copy for both ranks: what one writes the other sees.
    name = "model.norm.weight"
    dist.barrier()
    if rank == 0:
        lent[name].fill_(7)
    dist.barrier()
    assert lent[name].tolist() == [7] * 32
    dist.barrier()
    # The next call fills the same memory, and nothing of what was written stays.
    with torch.no_grad():
        engine.model.get_parameter(name).mul_(2)
    again = dict(engine.get_per_tensor_param())
    assert all(tensor.is_set_to(lent[name]) for name, tensor in again.items())
    assert torch.equal(lent[name], 2 * expected[name])
    # In small buckets, whose memory goes with whoever holds it.
    for_a_while = WholeWeights(engine.model, group, bucket_bytes=4096, keep_bytes=0)
    held, others = dict(for_a_while), dict(for_a_while)
    for tensors in (held, others):
        assert_close(tensors, expected | {name: 2 * expected[name]}, rtol=0, atol=0)
    assert not any(tensor.is_set_to(held[name]) for name, tensor in others.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) > 3
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in engine._units]  # training goes the same way
    assert {type(group._all_gather_comm) for group in groups} == {SharedAllGather}
    assert {type(group._reduce_scatter_comm) for group in groups} == {SharedReduceScatter}


def test_ranks_share_one_copy_of_the_weights_until_the_next(tmp_path: Path) -> None:
    odd = {"vocab_size": 105, "hidden_size": 32, "intermediate_size": 51}  # no even halves
    path = str(tiny_model_dir(tmp_path / "model", **odd))
    run_ranks(weights, 2, tmp_path, path)


# ---- weights of a model that is not sharded


def test_a_rank_that_holds_all_rows_lends_its_own_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied: it comes once
    whole = WholeWeights(model)
    first, second = dict(whole), dict(whole)
    assert list(first) == ["0.weight", "0.bias", "1.bias"]
    assert all(second[name] is tensor for name, tensor in first.items())
    assert all(tensor.data_ptr() == model.get_parameter(name).data_ptr() for name, tensor in first.items())
    assert not any(tensor.requires_grad for tensor in first.values())
    with torch.no_grad():
        model[0].bias.fill_(5)
    assert first["0.bias"].tolist() == [5, 5, 5]
    model[0].bias.data = torch.ones(3)  # the parameter goes to other memory
    model[1].bias = torch.nn.Parameter(torch.zeros(3))  # and is another
    third = dict(whole)
    assert third["0.bias"].tolist() == [1, 1, 1]
    assert third["1.bias"].tolist() == [0, 0, 0]
    assert third["0.weight"] is first["0.weight"]
