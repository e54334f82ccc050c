"""Batches that are not here yet."""

from __future__ import annotations

import pickle

import pytest

from tests.protocol.batches import four_rows, same
from verl.errors import SchemaError
from verl.protocol import DataProto, DataProtoFuture


def test_plain_values_of_the_local_controller():
    data = four_rows()
    future = DataProtoFuture.concat(data.chunk(2))
    assert same(future.get(), data)
    assert [part.get().batch["score"].tolist() for part in future.chunk(4)] == [[0.5], [1], [2], [4]]
    assert future.chunk(2)[1].chunk(2)[0].get().batch["score"].tolist() == [2]
    assert DataProtoFuture.concat([future, future.chunk(2)[0]]).get().batch["score"].tolist() == [0.5, 1, 2, 4, 0.5, 1]


def test_own_collect_and_dispatch():
    data = four_rows()
    future = DataProtoFuture(lambda parts: parts[-1], data.chunk(2), lambda whole: whole.repeat(2))
    assert future.get().batch["score"].tolist() == [2, 2, 4, 4]
    assert future.chunk(2)[0].get().batch["score"].tolist() == [2, 2]
    assert future.then(lambda whole: whole[1:3]).chunk(2)[1].get().batch["score"].tolist() == [4]


def test_chunks_can_be_sent_to_workers():
    chunk = pickle.loads(pickle.dumps(DataProtoFuture.concat([four_rows()]).chunk(2)[1]))
    assert same(chunk.get(), four_rows()[2:])


def test_a_part_that_is_no_batch():
    with pytest.raises(SchemaError, match="part 1 of a DataProtoFuture is a dict"):
        DataProtoFuture.concat([four_rows(), {}]).get()


def test_ray_references(ray_cluster: None):
    import ray

    @ray.remote(num_cpus=1)
    def double(future: DataProtoFuture) -> DataProto:
        data = future.get()
        return DataProto.from_dict({"doubled": data.batch["score"] * 2})

    parts = [ray.put(part) for part in four_rows().chunk(2)]
    future = DataProtoFuture.concat([double.remote(chunk) for chunk in DataProtoFuture.concat(parts).chunk(2)])
    assert future.get().batch["doubled"].tolist() == [1, 2, 4, 8]
