"""TensorDicts with values beside tensors, as public workers take them apart and put them together."""

from __future__ import annotations

import pytest
import torch

from verl.compat.toolkit import tensordicts as tu
from verl.errors import SchemaError
from verl.protocol.columns import union_tensor_dict


def batch():
    jagged = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 2, 3, 4)], layout=torch.jagged)
    tensors = {"ids": torch.arange(8).view(4, 2), "tokens": jagged, "uid": ["a", "b", "c", "d"]}
    return tu.get_tensordict(tensors, {"temperature": 0.7, "names": ["x", "y"]})


def contents(td):
    return {
        "ids": tu.get(td, "ids")[:, 0].tolist(),
        "tokens": [len(row) for row in tu.get(td, "tokens").unbind()],
        "uid": tu.get(td, "uid"),
        "temperature": tu.get(td, "temperature"),
        "names": tu.get(td, "names"),
    }


def test_rows_are_chosen_cut_and_joined_in_every_kind_of_column():
    td, shared = batch(), {"temperature": 0.7, "names": ["x", "y"]}
    all_rows = {"ids": [0, 2, 4, 6], "tokens": [1, 2, 3, 4], "uid": ["a", "b", "c", "d"]} | shared
    assert contents(td) == all_rows
    chosen = tu.index_select_tensor_dict(td, [3, 0])
    assert contents(chosen) == {"ids": [6, 0], "tokens": [4, 1], "uid": ["d", "a"]} | shared
    halves = tu.chunk_tensordict(td, 2)
    assert [tu.get(half, "uid") for half in halves] == [["a", "b"], ["c", "d"]]
    joined = tu.concat_tensordict(halves)
    assert contents(joined) == all_rows
    tu.assert_tensordict_eq(joined, td)
    with pytest.raises(AssertionError, match="'uid' differs"):
        tu.assert_tensordict_eq(tu.index_select_tensor_dict(td, [1, 0, 2, 3]).select("uid"), td.select("uid"))
    padded, added = tu.pad_to_divisor(td, 3)
    assert (tu.get(padded, "uid"), added) == (["a", "b", "c", "d", "a", "b"], 2)
    tu.assert_tensordict_eq(tu.unpad(padded, added), td)
    with pytest.raises(SchemaError, match="4 rows do not split into 3 equal parts"):
        tu.chunk_tensordict(td, 3)


def test_columns_are_read_set_and_removed():
    td = batch()
    assert tu.get(td, "nothing", 5) == tu.pop(td, "nothing", 5) == tu.get_non_tensor_data(td, "nothing", 5) == 5
    assert tu.assign_non_tensor(td, step=3, uid=["e", "f", "g", "h"]) is td
    assert (tu.get(td, "step"), tu.get(td, "uid")) == (3, ["e", "f", "g", "h"])
    with pytest.raises(SchemaError, match="'uid' has 2 values for 4 rows"):
        tu.assign_non_tensor(td, uid=["e", "f"])
    taken = tu.pop_keys(td, ["ids", "uid"])
    assert sorted(taken.keys()) == ["ids", "uid"]
    assert "ids" not in td.keys()
    with pytest.raises(KeyError, match="no column 'ids'"):
        tu.get_keys(td, ["ids"])
    assert tu.pop(td, "temperature") == 0.7


def test_the_ragged_dimension_stays_where_rows_have_one_length():
    positions = tu.nested_tensor_from_tensor_list([torch.full((4, length), length) for length in (2, 3, 3, 1)])
    chosen = tu.get(tu.index_select_tensor_dict(tu.get_tensordict({"positions": positions}), [1, 2]), "positions")
    assert (chosen.values().shape, chosen.offsets().tolist()) == ((4, 6), [0, 3, 6])
    first = tu.nested_tensor_from_tensor_list([torch.zeros(length, 2) for length in (1, 3)], ragged_idx=1)
    assert tu.concat_nested_tensors([first, first]).values().shape == (8, 2)


def test_values_per_row_are_united_if_they_are_equal():
    a, b = tu.get_tensordict({"uid": ["a", "b"]}), tu.get_tensordict({"uid": ["a", "b"], "x": torch.zeros(2)})
    assert sorted(union_tensor_dict(a, b).keys()) == ["uid", "x"]
    tu.assign_non_tensor(b, uid=["a", "c"])
    with pytest.raises(SchemaError, match="'uid' is in both batches with different values"):
        union_tensor_dict(a, b)


def test_rows_become_columns():
    td = tu.list_of_dict_to_tensordict([{"a": torch.tensor([1, 2]), "b": "x"}, {"a": torch.tensor([3]), "b": None}])
    assert [row.tolist() for row in tu.get(td, "a").unbind()] == [[1, 2], [3]]
    assert tu.get(td, "b") == ["x", None]
    with pytest.raises(SchemaError, match="same number of rows"):
        tu.get_tensordict({"a": torch.zeros(2), "b": ["x"]})


def test_mini_batches_see_each_row_once_an_epoch_and_follow_their_seed():
    def drawn(seed):
        return [tu.get(part, "uid") for part in tu.make_iterator(batch(), 2, epochs=2, seed=seed)]

    assert drawn(None) == [["a", "b"], ["c", "d"]] * 2
    shuffled = drawn(1)
    assert sorted(shuffled[0] + shuffled[1]) == sorted(shuffled[2] + shuffled[3]) == ["a", "b", "c", "d"]
    assert drawn(1) == shuffled != drawn(2)
