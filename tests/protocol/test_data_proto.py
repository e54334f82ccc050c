"""What each method of DataProto does to rows and columns, on literal values."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from tests.protocol.batches import four_rows, same
from verl.errors import SchemaError
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    compute_response_mask,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    replace_columns,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
    with_response_mask,
)

NAN = float("nan")


def scores(data: DataProto) -> list[float]:
    return data.batch["score"].tolist()


# ---- making and looking ---------------------------------------------------------------------------


def test_columns_are_found_where_they_belong():
    data = DataProto.from_single_dict(
        {"ids": torch.zeros(2, 3), "uid": np.array(["a", "b"], dtype=object), "n": [1, 2]}
    )
    assert list(data.batch.keys()) == ["ids"]
    assert list(data.non_tensor_batch) == ["uid", "n"]
    assert len(data) == 2
    assert len(data.batch) == 2


def test_a_list_of_equally_long_lists_is_one_column_of_lists():
    column = DataProto.from_dict(non_tensors={"tools": [[1, 2], [3, 4]]}).non_tensor_batch["tools"]
    assert column.shape == (2,)
    assert column[1] == [3, 4]


def test_columns_are_attributes():
    data = DataProto.from_dict(non_tensors={"responses": ["42"], "ground_truth_answers": ["41"]}) | DataProto.from_dict(
        {"values": torch.ones(1, 2)}
    )
    assert data.responses[0] == "42"
    assert data.ground_truth_answers[0] == "41"
    assert_close(data.values, torch.ones(1, 2))
    with pytest.raises(AttributeError, match="neither attribute nor column 'rewards'; columns: ground_truth_answers, "):
        data.rewards  # noqa: B018
    assert not hasattr(data, "__array__")


def test_rows_are_items():
    item = four_rows()[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["responses"].tolist() == [7, 8]
    assert item.non_tensor_batch == {"uid": "b", "raw_prompt": [4]}
    assert item.meta_info == {"global_steps": 3}
    assert [row.non_tensor_batch["uid"] for row in four_rows()] == ["a", "a", "b", "b"]
    assert four_rows()[np.int64(1)].batch["score"] == 1


@pytest.mark.parametrize(
    "index",
    [
        slice(1, None, 2),
        [1, 3],
        [-3, -1],
        range(1, 4, 2),
        np.array([1, 3]),
        torch.tensor([1, 3]),
        [False, True, False, True],
        np.array([False, True, False, True]),
        torch.tensor([False, True, False, True]),
    ],
)
def test_all_ways_to_name_rows(index: object):
    part = four_rows()[index]
    assert scores(part) == [1, 4]
    assert part.non_tensor_batch["raw_prompt"].tolist() == [[2], [4]]
    assert part.meta_info == {"global_steps": 3}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 4], "row 4 does not exist: the batch has 4 rows"),
        (-5, "row -5 does not exist"),
        ([True], "a mask of 1 values cannot choose from a batch of 4 rows"),
        ([0.5], "whole numbers or booleans, got float64"),
        (["a"], "whole numbers or booleans"),
        ([[0], [1]], "one-dimensional"),
    ],
)
def test_rows_that_do_not_exist(index: object, message: str):
    with pytest.raises(SchemaError, match=message):
        four_rows()[index]


def test_slices_backwards_and_empty():
    assert scores(four_rows().slice(step=-1)) == [4, 2, 1, 0.5]
    assert scores(four_rows().slice(1, 3)) == [1, 2]
    assert len(four_rows()[2:2]) == 0
    assert len(four_rows()[[]]) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inconsistent_columns_are_refused():
    with pytest.raises(SchemaError, match="'uid' has 3 rows, the batch has 2"):
        DataProto.from_dict({"ids": torch.zeros(2)}, {"uid": ["a", "b", "c"]})
    with pytest.raises(SchemaError, match=r"first 1 dimension.*a: float32 \(2,\), b: float32 \(3,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(SchemaError, match="first 1 dimension"):
        DataProto.from_dict({"a": torch.tensor(1.0)})
    with pytest.raises(SchemaError, match="'a' is a list, not a tensor"):
        DataProto.from_dict({"a": [1]})
    with pytest.raises(SchemaError, match="'a' is a str; columns are tensors, arrays, or lists"):
        DataProto.from_single_dict({"a": "text"})
    with pytest.raises(SchemaError, match="'uid' of non_tensor_batch is \\['a'\\]; use a numpy array"):
        DataProto(non_tensor_batch={"uid": ["a"]})
    with pytest.raises(SchemaError, match=r"'n' of non_tensor_batch is int64 \(\); use"):
        DataProto.from_dict(non_tensors={"n": np.array(3)})
    with pytest.raises(SchemaError, match="no batch dimension"):
        DataProto(TensorDict({"a": torch.zeros(2)}, batch_size=[]))
    with pytest.raises(SchemaError, match="'a' of batch is a TensorDict; columns there are dense tensors"):
        DataProto(TensorDict({"a": {"b": torch.zeros(2)}}, batch_size=[2]))
    with pytest.raises(SchemaError, match="'a' of batch"):
        DataProto(TensorDict({"a": torch.eye(2).to_sparse()}, batch_size=[2]))
    ragged = [torch.zeros(2), torch.zeros(3)]
    for layout in (torch.jagged, torch.strided):
        with pytest.raises(SchemaError, match=r"'a' of batch is a .* Pad ragged values"):
            DataProto(TensorDict({"a": torch.nested.nested_tensor(ragged, layout=layout)}, batch_size=[2]))


def test_reports():
    data = four_rows()
    assert data.get_data_info() == (
        "4 rows\nbatch responses: int64 (4, 2)\nbatch score: float32 (4,)\nnon_tensor_batch uid: object (4,)\n"
        "non_tensor_batch raw_prompt: object (4,)\nmeta_info global_steps: 3"
    )
    # 4·2 int64 and 4 float32; two columns of four references
    assert data.print_size("rollout:") == "rollout: 4 rows: tensors 80 bytes, others 64 bytes"


# ---- nothing is shared by accident ----------------------------------------------------------------


@pytest.mark.parametrize(
    "derive",
    [
        lambda d: d.select(),
        lambda d: d[0:2],
        lambda d: d[[0]],
        lambda d: d[0],
        lambda d: d.to("cpu"),
        lambda d: d.repeat(2),
        lambda d: d.chunk(2)[1],
        lambda d: d.split(3)[0],
        lambda d: d | DataProto(),
        lambda d: DataProto() | d,
        lambda d: DataProto.concat([d]),
        lambda d: DataProto.concat([d, d]),
        lambda d: d.unfold_column_chunks(2),
        lambda d: d.sample_level_repeat([1, 1, 1, 1]),
        lambda d: next(d.make_iterator(2, 1)),
        lambda d: fold_batch_dim(d, 2),
        lambda d: pad_dataproto_to_divisor(d, 3)[0],
        copy.copy,
    ],
)
def test_parts_have_their_own_meta_info_and_columns(derive):
    data = four_rows()
    part = derive(data)
    part.meta_info["temperature"] = 1.0
    part.batch["extra"] = torch.zeros(part.batch.batch_size)
    part.non_tensor_batch["more"] = part.non_tensor_batch["uid"]
    assert same(data, four_rows())


def test_deep_copies_share_no_memory():
    data = four_rows()
    for other in (copy.deepcopy(data), data.select(deepcopy=True)):
        other.batch["score"] += 1
        other.non_tensor_batch["raw_prompt"][0].append(9)
    assert same(data, four_rows())


def test_views_share_memory_and_selections_do_not():
    data = four_rows()
    start = data.batch["score"].data_ptr()
    assert data.chunk(2)[0].batch["score"].data_ptr() == start
    assert data.select(batch_keys=["score"]).batch["score"].data_ptr() == start
    assert DataProto.concat([data]).batch["score"].data_ptr() == start
    assert data[[0, 1]].batch["score"].data_ptr() != start


# ---- columns --------------------------------------------------------------------------------------


def test_select():
    data = four_rows()
    part = data.select(["score"], ["uid"], [])
    assert part.get_data_info() == "4 rows\nbatch score: float32 (4,)\nnon_tensor_batch uid: object (4,)"
    none = data.select(batch_keys=[], non_tensor_batch_keys=[])
    assert len(none) == 4
    assert none.get_data_info() == "4 rows\nmeta_info global_steps: 3"
    assert len(none.repeat(2)) == 8
    with pytest.raises(SchemaError, match="batch has no 'values'; it has: responses, score"):
        data.select(["score", "values"])
    with pytest.raises(SchemaError, match="non_tensor_batch has no 'index'"):
        data.select(non_tensor_batch_keys=["index"])


def test_pop():
    data = four_rows()
    taken = data.pop(["score"], ["uid"], ["global_steps"])
    assert data.get_data_info() == "4 rows\nbatch responses: int64 (4, 2)\nnon_tensor_batch raw_prompt: object (4,)"
    assert scores(taken) == [0.5, 1, 2, 4]
    assert taken.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert taken.meta_info == {"global_steps": 3}
    with pytest.raises(SchemaError, match="batch has no 'score'"):
        data.pop(["score"])
    data.pop(non_tensor_batch_keys=["raw_prompt"])
    assert data.get_data_info() == "4 rows\nbatch responses: int64 (4, 2)"


def test_rename():
    data = four_rows()
    assert data.rename("score", "reward") is data
    assert data.batch["reward"].tolist() == [0.5, 1, 2, 4]
    data.rename(["reward", "responses"], ["responses", "reward"])
    assert data.batch["responses"].tolist() == [0.5, 1, 2, 4]
    with pytest.raises(SchemaError, match="two columns one name"):
        data.rename("reward", "responses")
    with pytest.raises(SchemaError, match="one new name for each"):
        data.rename(["reward"], ["a", "b"])
    with pytest.raises(SchemaError, match="batch has no 'score'"):
        data.rename("score", "a")


def test_or_makes_a_new_batch_and_union_adds_to_this_one():
    a, b = four_rows(), DataProto.from_dict({"values": torch.ones(4)}, meta_info={"temperature": 0.5})
    united = a | b
    assert list(united.batch.keys()) == ["responses", "score", "values"]
    assert united.meta_info == {"global_steps": 3, "temperature": 0.5}
    assert same(a, four_rows())
    assert a.union(b) is a
    assert same(a, united)


def test_union_refuses_unequal_values():
    a = DataProto.from_dict({"values": torch.tensor([1.0, NAN])}, {"x": [NAN, {"y": [NAN]}]}, {"t": NAN})
    same_again = DataProto.from_dict({"values": torch.tensor([1.0, NAN])}, {"x": [NAN, {"y": [NAN]}]}, {"t": NAN})
    assert same(a | same_again, a)
    with pytest.raises(SchemaError, match=r"column 'values' is in both .* float32 .*, which differ from row 0 on"):
        a | DataProto.from_dict({"values": torch.tensor([NAN, 1.0])})
    with pytest.raises(SchemaError, match=r"'values'.*float32 \(2,\) and float64 \(2,\)"):
        a | DataProto.from_dict({"values": torch.tensor([1.0, NAN]).double()})
    with pytest.raises(SchemaError, match="column 'x'"):
        a | DataProto.from_dict(non_tensors={"x": [NAN, {"y": [1.0]}]})
    with pytest.raises(SchemaError, match=r"meta_info entry 't'.*nan and 1.0"):
        a | DataProto(meta_info={"t": 1.0})
    before = a.select()
    with pytest.raises(SchemaError, match="cannot unite 2 rows"):
        a.union(DataProto.from_dict({"other": torch.zeros(3)}))
    assert same(a, before)


def test_union_of_the_parts():
    td = TensorDict({"a": torch.tensor([1, 2])}, batch_size=[2])
    assert sorted(union_tensor_dict(td, TensorDict({"b": torch.zeros(2)}, batch_size=[2])).keys()) == ["a", "b"]
    assert list(td.keys()) == ["a"]
    with pytest.raises(SchemaError, match="'a' is in both"):
        union_tensor_dict(td, TensorDict({"a": torch.tensor([1, 3])}, batch_size=[2]))
    with pytest.raises(SchemaError, match="one to one"):
        union_tensor_dict(td, TensorDict({"b": torch.zeros(3)}, batch_size=[3]))
    a, b = {"x": np.array([1.0, NAN])}, {"x": np.array([1.0, NAN]), "y": np.array(["t"], dtype=object)}
    assert union_numpy_dict(a, b).keys() == {"x", "y"}
    for other in (np.array([1.0, 2.0]), np.array([1.0]), np.array([1.0, "t"], dtype=object)):
        with pytest.raises(SchemaError, match="'x' is in both"):
            union_numpy_dict(a, {"x": other})


# ---- rows -----------------------------------------------------------------------------------------


def test_repeat():
    data = four_rows()[:2]
    assert scores(data.repeat(2, interleave=True)) == [0.5, 0.5, 1, 1]
    assert scores(data.repeat(2, interleave=False)) == [0.5, 1, 0.5, 1]
    assert data.repeat(2).non_tensor_batch["raw_prompt"].tolist() == [[1], [1], [2], [2]]
    assert data.repeat(2, interleave=False).non_tensor_batch["raw_prompt"].tolist() == [[1], [2], [1], [2]]
    with pytest.raises(SchemaError, match="repeated -1 times"):
        data.repeat(-1)


def test_sample_level_repeat():
    for times in ([2, 0, 1, 1], np.array([2, 0, 1, 1]), torch.tensor([2, 0, 1, 1])):
        assert scores(four_rows().sample_level_repeat(times)) == [0.5, 0.5, 2, 4]
    with pytest.raises(SchemaError, match=r"one count for each of 4 rows, got int64 \(2,\)"):
        four_rows().sample_level_repeat([1, 2])


def test_reorder_in_place():
    data = four_rows()
    before = data.batch["score"]
    assert data.reorder(torch.tensor([3, 0, 2, 1])) is None
    assert scores(data) == [4, 0.5, 2, 1]
    assert data.non_tensor_batch["raw_prompt"].tolist() == [[4], [1], [3], [2]]
    assert before.tolist() == [0.5, 1, 2, 4]
    for wrong in ([0, 1], [0, 1, 2, 2]):
        with pytest.raises(SchemaError, match="each of the 4 rows once"):
            data.reorder(wrong)


def test_unfold_column_chunks():
    data = DataProto.from_dict(
        {"pair": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "score": torch.tensor([1, 2])},
        {"names": np.array([["x", "y"], ["z", "w"]]), "uid": ["a", "b"]},
    )
    pieces = data.unfold_column_chunks(2, split_keys=["pair", "names"])
    assert pieces.batch["pair"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert pieces.batch["score"].tolist() == [1, 1, 2, 2]
    assert pieces.non_tensor_batch["names"].tolist() == [["x"], ["y"], ["z"], ["w"]]
    assert pieces.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert data.unfold_column_chunks(2).batch["pair"].shape == (4, 4)
    with pytest.raises(SchemaError, match=r"'pair' \(2, 4\) does not split into 3 pieces"):
        data.unfold_column_chunks(3, split_keys=["pair"])


def test_chunk_and_split():
    data = four_rows()
    assert [scores(part) for part in data.chunk(2)] == [[0.5, 1], [2, 4]]
    assert [scores(part) for part in data.split(3)] == [[0.5, 1, 2], [4]]
    with pytest.raises(SchemaError, match="4 rows do not divide into 3 equal chunks"):
        data.chunk(3)
    with pytest.raises(SchemaError, match="positive number of rows, got 0"):
        data.split(0)


def test_uneven_chunks_where_padding_is_enabled(monkeypatch: pytest.MonkeyPatch):
    data = DataProto.from_dict({"score": torch.tensor([1, 2, 3, 4])}, auto_padding=True)
    assert [scores(part) for part in data.chunk(3)] == [[1, 2], [3], [4]]
    assert [len(part) for part in data[:2].chunk(3)] == [1, 1, 0]
    assert all(part.is_padding_enabled() for part in (data.select(), data[:1], data.repeat(2), data | DataProto()))
    assert not four_rows().is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert four_rows().is_padding_enabled()
    assert [len(part) for part in four_rows().chunk(3)] == [2, 1, 1]


def test_a_new_process_reads_the_environment_and_loads_little():
    code = (
        "import sys, verl.protocol, verl.schema; print(verl.protocol.DataProtoConfig.auto_padding, "
        "[name for name in ('ray', 'transformers', 'tensordict') if name in sys.modules])"
    )
    environment = {**os.environ, "VERL_AUTO_PADDING": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True []"


def test_padding_in_place():
    data = four_rows()
    data.padding(2)
    assert scores(data) == [0.5, 1, 2, 4, 4, 4]
    data.padding(1, "first")
    assert scores(data) == [0.5, 1, 2, 4, 4, 4, 0.5]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b", "b", "b", "a"]
    data.padding(0)
    assert len(data) == 7
    with pytest.raises(SchemaError, match="'first' or 'last', got 1 and 'middle'"):
        data.padding(1, "middle")


def test_pad_and_unpad():
    data = four_rows()
    padded, pad_size = pad_dataproto_to_divisor(data, 3)
    assert pad_size == 2
    assert scores(padded) == [0.5, 1, 2, 4, 0.5, 1]
    assert same(unpad_dataproto(padded, pad_size), data)
    padded, pad_size = pad_dataproto_to_divisor(data[:1], 4)
    assert (scores(padded), pad_size) == ([0.5, 0.5, 0.5, 0.5], 3)
    assert pad_dataproto_to_divisor(data, 2) == (data, 0)
    for wrong in (5, -1):
        with pytest.raises(SchemaError, match="rows of padding from a batch of 4 rows"):
            unpad_dataproto(data, wrong)
    with pytest.raises(SchemaError, match="multiple of 0"):
        pad_dataproto_to_divisor(data, 0)


def test_concat():
    data = four_rows()
    joined = DataProto.concat([data[2:], data[:1]])
    assert scores(joined) == [2, 4, 0.5]
    assert joined.non_tensor_batch["raw_prompt"].tolist() == [[3], [4], [1]]
    a, b = DataProto(meta_info={"x": 1, "y": NAN}), DataProto(meta_info={"y": NAN, "z": [3]})
    assert same(DataProto.concat([a, b]), DataProto(meta_info={"x": 1, "y": NAN, "z": [3]}))
    words = [DataProto.from_dict(non_tensors={"t": np.array([text])}) for text in ("a", "longer")]
    assert DataProto.concat(words).non_tensor_batch["t"].tolist() == ["a", "longer"]


def test_metrics_of_several_workers_become_lists():
    of_workers = [{"loss": 1.0}, [{"loss": 3.0, "kl": [0.5]}, {"loss": 2.0}], None]
    parts = [DataProto(meta_info={"metrics": metrics, "step": 4}) for metrics in of_workers]
    assert DataProto.concat(parts).meta_info == {"step": 4, "metrics": {"loss": [1.0, 3.0, 2.0], "kl": [0.5]}}
    assert DataProto.concat(parts[:1]).meta_info["metrics"] == {"loss": [1.0]}
    assert parts[0].meta_info["metrics"] == {"loss": 1.0}
    with pytest.raises(AssertionError, match="meta_info entry 'step'"):  # the kind that public code catches
        DataProto.concat([parts[0], DataProto(meta_info={"step": 5})])


def test_a_batch_without_any_part():
    data = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
    assert (len(data), data.non_tensor_batch, data.meta_info) == (0, {}, {})
    rows = DataProto(batch=None, non_tensor_batch={"uid": np.array(["a", "b"], dtype=object)})
    assert [len(part) for part in rows.chunk(2)] == [1, 1]
    assert DataProto.concat([rows, rows]).non_tensor_batch["uid"].tolist() == ["a", "b", "a", "b"]


def test_a_missing_name_is_a_key_error_and_a_missing_row_an_index_error():
    data = four_rows()
    for choose in (lambda: data.select(["none"]), lambda: data.pop(non_tensor_batch_keys=["none"])):
        with pytest.raises(KeyError) as error:
            choose()
        assert "has no 'none'; it has" in str(error.value)
        assert isinstance(error.value, SchemaError)
    with pytest.raises(IndexError, match="row 4 does not exist"):
        data[4]


def test_concat_refuses_what_does_not_fit():
    data = four_rows()
    with pytest.raises(SchemaError, match="at least one"):
        DataProto.concat([])
    with pytest.raises(SchemaError, match="'score' is missing in batch 1 of 2"):
        DataProto.concat([data, data.select(["responses"])])
    with pytest.raises(SchemaError, match="'score' is missing in batch 0 of 2"):
        DataProto.concat([data.select(["responses"]), data])
    with pytest.raises(SchemaError, match="non-tensor column 'uid' is missing in batch 1"):
        DataProto.concat([data, data.select(non_tensor_batch_keys=["raw_prompt"])])
    with pytest.raises(SchemaError, match=r"'responses' is int64 \(4, 2\) in batch 0 and int64 \(4, 3\) in batch 1"):
        DataProto.concat([DataProto.from_dict({"responses": torch.zeros(4, n).long()}) for n in (2, 3)])
    with pytest.raises(SchemaError, match=r"float32.*float64"):
        DataProto.concat([DataProto.from_dict({"s": torch.zeros(1, dtype=d)}) for d in (torch.float32, torch.float64)])
    with pytest.raises(SchemaError, match=r"meta_info entry 'loss' .*1.0 and 2.0"):
        DataProto.concat([DataProto(meta_info={"loss": x}) for x in (1.0, 2.0)])


def test_make_iterator():
    data = four_rows()
    in_order = [scores(part) for part in data.make_iterator(mini_batch_size=2, epochs=2)]
    assert in_order == [[0.5, 1], [2, 4], [0.5, 1], [2, 4]]

    def shuffled(seed: int) -> list[list[float]]:
        return [scores(part) for part in data.make_iterator(1, 2, seed=seed, dataloader_kwargs={"shuffle": True})]

    assert shuffled(1) == shuffled(1)
    assert len({str(shuffled(seed)) for seed in range(5)}) > 1
    assert sorted(shuffled(1)[:4]) == sorted(shuffled(1)[4:]) == [[0.5], [1], [2], [4]]
    assert next(data.make_iterator(2, 1)).meta_info == {"global_steps": 3}
    with pytest.raises(SchemaError, match="mini_batch_size=3 does not divide the batch of 4 rows"):
        data.make_iterator(3, 1)


# ---- empty batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"x": 1}),
        DataProto.from_dict(non_tensors={"uid": []}),
        DataProto.from_dict({"ids": torch.zeros(0, 3)}, {"uid": []}),
    ],
)
def test_batches_without_rows_work_everywhere(data: DataProto):
    assert len(data) == 0
    assert list(data) == []
    for other in (
        data.select(),
        data | data,
        data.to("cpu"),
        data.repeat(3),
        data[:2],
        data[[]],
        data.sample_level_repeat([]),
        data.unfold_column_chunks(2),
        DataProto.concat(data.chunk(2)),
        pad_dataproto_to_divisor(data, 4)[0],
        DataProto.from_tensordict(data.to_tensordict()),
    ):
        assert same(other, data)
    assert data.split(2) == []
    assert list(data.make_iterator(2, 1)) == []
    data.reorder([])
    data.padding(0)
    with pytest.raises(SchemaError, match="row -1 does not exist"):
        data.padding(1)


def test_batches_of_objects_alone():
    data = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    assert len(data) == 2
    assert data.repeat(2).uid.tolist() == ["a", "a", "b", "b"]
    assert DataProto.concat(data.chunk(2)).uid.tolist() == ["a", "b"]
    data.reorder([1, 0])
    assert data.uid.tolist() == ["b", "a"]


def test_batch_is_a_tensordict_also_where_there_are_no_tensors():
    """Scripts that test ``data.batch is None`` see a TensorDict without columns instead, which has the right rows."""
    named = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    for data in (
        named,
        DataProto(None, dict(named.non_tensor_batch)),
        named.select(non_tensor_batch_keys=[]),
        named | DataProto(),
        DataProto() | named,
        DataProto.concat(named.chunk(2)),
        pickle.loads(pickle.dumps(named)),
        named.pop(non_tensor_batch_keys=[]),
    ):
        assert (list(data.batch.keys()), data.batch.batch_size, len(data)) == ([], (2,), 2)
    assert DataProto().batch.batch_size == (0,)
    assert list(DataProtoItem().batch.keys()) == list(named[0].batch.keys()) == []
    named.batch["score"] = torch.tensor([1, 2])
    assert named.score.tolist() == [1, 2]
    named.batch = None
    assert (list(named.batch.keys()), len(named)) == ([], 2)
    grown = DataProto()
    grown.non_tensor_batch["uid"] = np.array(["a", "b", "c"])
    assert (len(grown), len(grown.select().batch)) == (3, 3)


def test_a_pickle_of_an_earlier_version_without_tensors_is_read():
    data = DataProto.__new__(DataProto)
    data.__setstate__({"batch": None, "non_tensor_batch": {"uid": np.array(["a", "b"])}, "meta_info": {"k": 1}})
    assert (len(data), data.batch.batch_size, data.uid.tolist(), data.meta_info) == (2, (2,), ["a", "b"], {"k": 1})


# ---- other shapes ---------------------------------------------------------------------------------


def test_tensordict_and_back():
    data = four_rows()
    whole = data.to_tensordict()
    assert whole.batch_size == (4,)
    assert whole[1:3]["uid"] == ["a", "b"]
    assert same(DataProto.from_tensordict(whole), data)
    assert DataProto.from_tensordict(whole, meta_info={"more": 1}).meta_info == {"global_steps": 3, "more": 1}
    assert same(DataProto.from_tensordict(None), DataProto())


def test_fold_and_unfold():
    folded = fold_batch_dim(four_rows(), 2)
    assert len(folded) == 2
    assert folded.batch.batch_size == (2, 2)
    assert folded.batch["responses"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert folded.non_tensor_batch["uid"].tolist() == [["a", "a"], ["b", "b"]]
    assert folded[[1]].batch["score"].tolist() == [[2, 4]]
    assert DataProto.concat([folded, folded]).batch.batch_size == (4, 2)
    assert same(unfold_batch_dim(folded), four_rows())
    with pytest.raises(SchemaError, match="4 rows do not fold into 3"):
        fold_batch_dim(four_rows(), 3)


def test_collate_rows():
    data = four_rows()
    assert same(collate_fn([data[3], data[0]]), data[[3, 0]])
    with pytest.raises(SchemaError, match="at least one"):
        collate_fn([])


def test_list_of_dicts():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(SchemaError, match="row 1 has the keys a, row 0 has a, b"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}])


def test_replaced_columns_win_and_the_batch_stays_as_it_was():
    batch = DataProto.from_dict({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}, {"name": ["x", "y"]})
    other = DataProto.from_dict({"b": torch.tensor([5, 6])}, {"name": ["z", "y"], "new": [None, [1]]})
    replaced = replace_columns(batch, other)
    assert {key: value.tolist() for key, value in replaced.batch.items()} == {"a": [1, 2], "b": [5, 6]}
    assert replaced.non_tensor_batch["name"].tolist() == ["z", "y"]
    assert replaced.non_tensor_batch["new"].tolist() == [None, [1]]
    assert batch.batch["b"].tolist() == [3, 4]
    names_alone = replace_columns(batch, DataProto.from_dict(non_tensors={"name": ["p", "q"]}))
    assert names_alone.batch["b"].tolist() == [3, 4]


def test_mask_of_responses_is_the_end_of_the_attention_mask():
    columns = {"attention_mask": torch.tensor([[0, 1, 1, 0]]), "responses": torch.tensor([[7, 0]])}
    batch = with_response_mask(DataProto.from_dict(columns))
    assert batch.batch["response_mask"].tolist() == [[1, 0]]
    own = DataProto.from_dict({**columns, "response_mask": torch.tensor([[0, 0]])})
    assert with_response_mask(own) is own
    columns["responses"] = torch.zeros(1, 0, dtype=torch.long)
    assert compute_response_mask(DataProto.from_dict(columns)).shape == (1, 0)
