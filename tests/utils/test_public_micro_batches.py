"""Micro-batches, gathering and workloads under the names that public workers call."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.forks import FORKS
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_group_balanced_partitions,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from verl.utils.torch_functional import allgather_dict_tensors


def batch_of(lengths: list[int], width: int = 16) -> TensorDict:
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask, "row": torch.arange(len(lengths))}, batch_size=[len(lengths)])


def test_workload_by_hand():
    # 24576·1 + 1 and 24576·10 + 100
    assert calculate_workload(torch.tensor([1, 10])).tolist() == [24577, 245860]


def test_micro_batches_by_hand():
    # 10 + 6 and 8 + 8 are two parts of at most 16 tokens.
    parts, rows = rearrange_micro_batches(batch_of([10, 8, 6, 8]), max_token_len=16)
    assert sorted(rows) == [[0, 2], [1, 3]]
    assert [part["row"].tolist() for part in parts] == rows
    with pytest.raises(ConfigError, match="a sequence of 10 tokens does not fit"):
        rearrange_micro_batches(batch_of([10, 2]), max_token_len=9)


@pytest.mark.parametrize("seed", range(20))
def test_budget_multiple_groups_and_order(seed: int):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 16) for _ in range(24)]
    multiple, least, together = draw.choice([1, 2, 3]), draw.choice([None, 4, 7]), draw.choice([1, 2])
    _, rows = rearrange_micro_batches(
        batch_of(lengths), 40, None, multiple, min_num_micro_batch=least, force_group_size=together
    )
    assert sorted(i for part in rows for i in part) == list(range(24))
    assert len(rows) % multiple == 0
    assert len(rows) >= (least or 1)
    tokens = [sum(lengths[i] for i in part) for part in rows]
    assert max(tokens) <= 40
    assert tokens == sorted(tokens, reverse=True)
    if together == 2:
        assert all(i ^ 1 in part for part in rows for i in part)
    _, plain = rearrange_micro_batches(batch_of(lengths), 40, use_dynamic_bsz_balance=False)
    assert plain == sorted(plain)


def test_too_few_rows():
    with pytest.raises(ValueError, match="2 rows or groups of rows cannot make 3"):
        rearrange_micro_batches(batch_of([3, 4]), 16, min_num_micro_batch=3)
    with pytest.raises(ValueError, match="3 rows do not divide into groups of 2"):
        rearrange_micro_batches(batch_of([3, 4, 5]), 16, force_group_size=2)


def test_a_data_proto_is_split_with_all_columns_and_put_back():
    lengths = [5, 9, 2, 7, 12]
    data = DataProto(batch=batch_of(lengths))
    data.non_tensor_batch["uid"] = torch.arange(5).numpy().astype(object)
    parts, rows = prepare_dynamic_batch(data, max_token_len=16)
    assert [part.non_tensor_batch["uid"].tolist() for part in parts] == rows
    together = torch.cat([part.batch["row"] for part in parts])
    assert together.tolist() != list(range(5))
    assert restore_dynamic_batch(together, rows).tolist() == list(range(5))
    ragged = torch.nested.as_nested_tensor([torch.full((n,), n) for n in together.tolist()], layout=torch.jagged)
    assert [row.numel() for row in restore_dynamic_batch(ragged, rows).unbind()] == list(range(5))


def test_groups_stay_together():
    # Tokens of the groups: a 12, b 8, c 3; the parts are a, and b with c.
    parts = get_group_balanced_partitions([6, 4, 3, 6, 4], ["a", "b", "c", "a", "b"], 2)
    assert sorted(parts) == [[0, 3], [1, 2, 4]]
    with pytest.raises(ValueError, match="1 sequences cannot make 2 parts"):
        get_group_balanced_partitions([1, 2], ["a", "a"], 2)


def rank_main(rank: int, address: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    # Rank 0 needs two parts of 16 tokens, rank 1 one; both make two, or with a multiple of 3 three.
    lengths = [[16, 4, 4], [2, 2, 2]][rank]
    counts = [
        len(rearrange_micro_batches(batch_of(lengths), 16, dist.group.WORLD, multiple)[1]) for multiple in (None, 3)
    ]
    alone = len(rearrange_micro_batches(batch_of(lengths), 16, dist.group.WORLD, same_micro_num_in_dp=False)[1])
    mine = TensorDict({"a": torch.full((2, 1), rank)}, batch_size=[2])
    gathered = allgather_dict_tensors(mine, 2, dist.group.WORLD)
    wide = allgather_dict_tensors({"a": torch.full((2, 1), rank)}, 2, dist.group.WORLD, dim=1)
    results.put((rank, counts, alone, gathered["a"].tolist(), gathered.batch_size[0], wide["a"].tolist()))
    dist.destroy_process_group()


def test_two_ranks_make_as_many(tmp_path):
    results = FORKS.Queue()
    ranks = [FORKS.Process(target=rank_main, args=(rank, f"file://{tmp_path}/store", results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    gathered = ([[0], [0], [1], [1]], 4, [[0, 1], [0, 1]])
    assert found == [(0, [2, 3], 2, *gathered), (1, [2, 3], 1, *gathered)]
