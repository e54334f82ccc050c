"""Dispatch over a mesh of two data-parallel ranks with two ranks each; no torch.distributed."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.single_controller.workers import batch_of
from verl.errors import SchemaError, WorkerError
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.dispatch import receive, remove_padding, take_part
from verl.single_controller.base.worker_group import _checked_mesh


def test_ranks_of_one_group_share_a_part_and_one_of_them_is_collected(meshed):
    out = meshed.train(batch_of([1.0, 2.0, 3.0, 4.0], meta_info={"seen": 3}), bias=0.5)
    assert out.batch["x"].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert out.batch["rank"].tolist() == [1, 1, 3, 3]
    assert out.meta_info == {"seen": 3}


def test_five_rows_over_two_parts_come_back_as_five(meshed):
    out = meshed.train(batch_of([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert out.batch["x"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert out.batch["rank"].tolist() == [1, 1, 1, 3, 3]
    assert out.non_tensor_batch["rows"].tolist() == [3, 3, 3, 3, 3]


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7])
def test_any_number_of_rows_is_exact_over_four_parts(meshed, rows):
    # parts of ceil(rows / 4) rows: rank i // size computes row i
    size = -(-rows // 4)
    out = meshed.wide(batch_of([float(i) for i in range(rows)]))
    assert out.batch["x"].tolist() == [100.0 * i for i in range(rows)]
    assert out.batch["rank"].tolist() == [i // size for i in range(rows)]


def test_an_update_returns_its_metrics_once(meshed):
    assert meshed.update(batch_of([1.0, 2.0])).meta_info == {"metrics": {"loss": 1.5}}


def test_an_update_on_repeated_samples_is_refused(meshed):
    with pytest.raises(WorkerError, match=r"Meshed.update on rank [23].*1 of the 2 rows of this rank are repeated"):
        meshed.update(batch_of([1.0, 2.0, 3.0]))


def test_an_unknown_mesh_is_named_with_the_known(meshed):
    with pytest.raises(WorkerError, match=r"mesh 'nowhere' is not known to Meshed \(known: \['train', 'wide'\]\)") as e:
        meshed.on_unknown_mesh(batch_of([1.0]))
    # One message for all four ranks, whichever was first.
    assert re.search(r"on rank \d of 4: .*\nThe same on ranks \d, \d, \d\.$", str(e.value))


def test_futures_pass_between_groups_without_the_driver(meshed, ray_pair, monkeypatch):
    arrived = []
    unpickle = DataProto.__setstate__
    monkeypatch.setattr(DataProto, "__setstate__", lambda self, state: (arrived.append(1), unpickle(self, state))[1])
    pair = ray_pair.spawn(["echo", "doubler"])

    first = pair["echo"].proto_later(batch_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))  # +10 on rank 0, +20 on rank 1
    second = meshed.train_later(first)  # ·2
    assert isinstance(second, DataProtoFuture)
    assert arrived == []
    assert second.get().batch["x"].tolist() == [22.0, 24.0, 26.0, 48.0, 50.0, 52.0]
    assert len(arrived) == 2  # the two parts of the second call, none of the first


def test_a_future_that_does_not_divide_is_padded_by_its_receivers(meshed, ray_pair):
    echo = ray_pair.spawn(["echo"])["echo"]
    first = echo.proto_later(batch_of([1.0, 2.0, 3.0, 4.0, 5.0], auto_padding=True))  # 11 12 13 24 25
    out = meshed.train_later(first).get()
    assert out.batch["x"].tolist() == [22.0, 24.0, 26.0, 48.0, 50.0]
    assert out.batch["rank"].tolist() == [1, 1, 1, 3, 3]
    assert meshed.wide(first).batch["x"].tolist() == [1100.0, 1200.0, 1300.0, 2400.0, 2500.0]


def test_registering_a_mesh_twice_must_agree(meshed):
    meshed.init_model([0, 0, 1, 1], [False, True, False, True])
    with pytest.raises(WorkerError, match=r"mesh 'train' is registered with .*\(0, False\), and now with \(0, True\)"):
        meshed.init_model([0, 0, 1, 1], [True, True, False, True])


@pytest.mark.parametrize(
    ("dp_ranks", "collects", "wrong"),
    [
        ([0, 0, 1, 1], [True, True, True, False], r"\{0: \[0, 1\]\}"),
        ([0, 0, 1, 1], [True, False, False, False], r"\{1: \[\]\}"),
        ([0, 2], [True, True], r"\{1: \[\]\}"),
    ],
)
def test_a_mesh_needs_one_collected_rank_per_part(dp_ranks, collects, wrong):
    with pytest.raises(WorkerError, match=f"exactly one rank that is collected.*{wrong}"):
        _checked_mesh("train", dp_ranks, collects)


def test_parts_are_filled_up_with_the_first_rows():
    batch = batch_of([0.0, 1.0, 2.0, 3.0, 4.0])
    cut = [take_part(batch, i, 4, "always") for i in range(4)]  # size 2, three rows of padding
    assert [part.rows.batch["x"].tolist() for part in cut] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert [part.padding for part in cut] == [0, 0, 1, 2]


def test_padding_needs_permission():
    with pytest.raises(SchemaError, match=r"5 rows cannot be dealt to 2.*e.g. 4 rows.*auto_padding=True"):
        take_part(batch_of([0.0] * 5), 0, 2, "if enabled")
    with pytest.raises(SchemaError, match=r"e\.g\. 2 rows\.$"):
        take_part(batch_of([0.0]), 0, 2, "never")


@given(rows=st.integers(1, 20), parts=st.integers(1, 7))
def test_parts_without_their_padding_are_the_batch(rows, parts):
    batch = DataProto.from_dict({"x": torch.arange(rows)}, {"name": [f"row {i}" for i in range(rows)]})
    cut = [take_part(batch, i, parts, "always") for i in range(parts)]
    assert {len(part.rows) for part in cut} == {-(-rows // parts)}
    whole = DataProto.concat([remove_padding(part.rows, part if part.padding else None) for part in cut])
    assert whole.batch["x"].tolist() == list(range(rows))
    assert whole.non_tensor_batch["name"].tolist() == [f"row {i}" for i in range(rows)]


def test_batches_of_one_call_must_agree_in_rows_if_padded():
    def last_part(rows):
        part = take_part(batch_of([float(i) for i in range(rows)]), 1, 2, "always")
        return part if part.padding else part.rows

    (args, kwargs), part = receive((last_part(3),), {"other": last_part(3), "mode": "x"}, True)
    assert [args[0].batch["x"].tolist(), kwargs["other"].batch["x"].tolist()] == [[2.0, 0.0], [2.0, 0.0]]
    assert (kwargs["mode"], part.padding) == ("x", 1)
    for rows in (4, 5):  # parts of (2, 0) and (3, 1) beside one of (2, 1)
        with pytest.raises(SchemaError, match="same number of rows"):
            receive((last_part(3), last_part(rows)), {}, True)


def test_padding_is_removed_only_where_rows_correspond():
    part = take_part(batch_of([0.0, 1.0, 2.0]), 1, 2, "always")
    assert remove_padding(DataProto.from_dict({"y": torch.tensor([5, 6])}), part).batch["y"].tolist() == [5]
    for output in (DataProto.from_dict({"y": torch.zeros(4)}), {"loss": 1.0}, None):
        with pytest.raises(SchemaError, match="cannot be removed"):
            remove_padding(output, part)
