"""Batches cross processes without needless copies, and stay their owner's."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tests.protocol.batches import DTYPES, four_rows, random_tensor, same, same_tensors
from verl.errors import SchemaError
from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from verl.protocol.transport import UnreadColumn

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def large() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(LARGE).view(4, -1), "log_probs": torch.zeros(4, LARGE, dtype=torch.bfloat16)},
        {"numbers": np.zeros((4, LARGE)), "uid": ["a", "b", "c", "d"]},
    )


def dumps(data: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def read_only(buffers: list[pickle.PickleBuffer]) -> list[memoryview]:
    """The same memory as the buffers', as another process sees it in an object store."""
    return [memoryview(buffer).toreadonly() for buffer in buffers]


def test_columns_travel_out_of_band_and_uncopied(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    data = large()
    message, buffers = dumps(data)
    assert len(message) < 2000
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [LARGE * 8, LARGE * 8, LARGE * 32]
    sent = {np.frombuffer(buffer.raw(), np.uint8).ctypes.data for buffer in buffers}
    assert sent == {
        data.batch["ids"].data_ptr(), data.batch["log_probs"].data_ptr(), data.non_tensor_batch["numbers"].ctypes.data
    }  # fmt: skip


def test_on_few_cores_long_columns_travel_in_pieces(monkeypatch):
    """Of 1 MiB, which Ray copies on one thread; bytes that are no whole piece, and columns no longer than one."""
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    counted = torch.arange(LARGE + 3, dtype=torch.int32).view(1, -1)
    data = DataProto.from_dict({"long": counted, "short": counted[:, : LARGE // 4]})
    message, buffers = dumps(data)
    assert [buffer.raw().nbytes for buffer in buffers] == [LARGE] * 4 + [12] + [LARGE]
    start = data.batch["long"].data_ptr()
    assert [np.frombuffer(b.raw(), np.uint8).ctypes.data - start for b in buffers[:5]] == [n * LARGE for n in range(5)]

    received = pickle.loads(message, buffers=read_only(buffers))
    again, passed_on = dumps(received)  # unread: as they came
    assert [buffer.raw().nbytes for buffer in passed_on] == [LARGE] * 4 + [12] + [LARGE]
    joined = DataProto.concat([received, pickle.loads(again, buffers=read_only(passed_on))])
    assert torch.equal(joined.batch["long"], torch.cat([counted, counted]))
    received.batch["long"] += 1
    assert torch.equal(received.batch["long"], counted + 1)
    assert same(data, pickle.loads(pickle.dumps(data)))
    assert data.batch["long"][0, 0] == 0


def test_a_part_sends_its_own_rows_alone(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    _, buffers = dumps(large().chunk(4)[1].select(["ids"], []))
    assert [buffer.raw().nbytes for buffer in buffers] == [LARGE * 2]
    # a strided view is copied, but not with all the memory that it looks into
    _, buffers = dumps(DataProto.from_dict({"first": large().batch["ids"][:, :1]}))
    assert [buffer.raw().nbytes for buffer in buffers] == [4 * 8]


def test_writing_to_a_received_batch_changes_no_one_elses():
    sent = large()
    message, buffers = dumps(sent)
    readers = [pickle.loads(message, buffers=read_only(buffers)) for _ in range(2)]
    for column in (*readers[0].batch.values(), readers[0].non_tensor_batch["numbers"]):
        column += 1
    assert same(sent, large())
    assert same(readers[1], large())


def test_a_private_buffer_is_adopted():
    message, buffers = dumps(four_rows())
    private = [bytearray(buffer.raw()) for buffer in buffers]
    received = pickle.loads(message, buffers=private)
    addresses = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in private}
    assert {tensor.data_ptr() for tensor in received.batch.values()} == addresses
    received.batch["score"] += 1


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_pickles_are_writable(protocol: int):
    received = pickle.loads(pickle.dumps(four_rows(), protocol))
    assert same(received, four_rows())
    received.batch["score"] += 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (2, 0), (3,), ()])
def test_tensors_keep_bits_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = random_tensor(dtype, shape, seed=0)
    wire = serialize_single_tensor(tensor)
    assert wire[:2] == (str(dtype).removeprefix("torch."), shape)
    assert same_tensors({"t": deserialize_single_tensor(wire)}, {"t": tensor})


def test_special_tensors_arrive_plain():
    x = torch.tensor([[1.0, float("nan")], [-0.0, float("inf")]], requires_grad=True)
    for tensor in (
        x,
        x.T,
        x[:, :1],
        x.expand(3, 2, 2),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ):
        received = deserialize_single_tensor(serialize_single_tensor(tensor))
        assert not received.requires_grad
        assert received.is_contiguous()
        assert same_tensors({"t": received}, {"t": tensor.detach().resolve_conj().resolve_neg()})


def test_tensordicts():
    batch = four_rows().batch
    size, device, columns = serialize_tensordict(batch)
    assert (size, device) == ((4,), None)
    received = deserialize_tensordict((size, device, columns))
    assert (received.batch_size, received.device) == ((4,), None)
    assert deserialize_tensordict(serialize_tensordict(batch.to("cpu"))).device == torch.device("cpu")
    assert same_tensors(dict(received.items()), dict(batch.items()))


def test_through_ray(ray_cluster: None):
    import ray

    @ray.remote(num_cpus=1)
    def spoil(data: DataProto) -> DataProto:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            received = data.select(deepcopy=True)
            for column in (*data.batch.values(), data.non_tensor_batch["numbers"]):
                column += 1
        return received

    reference = ray.put(large())
    received = ray.get(spoil.remote(reference))
    assert same(received, large())
    assert same(ray.get(reference), large())
    received.batch["ids"] += 1


# ---- columns that nobody has read yet ---------------------------------------------------------------


def arrived(data: DataProto) -> DataProto:
    """The batch as it comes out of an object store: its bytes may not be written to."""
    message, buffers = dumps(data)
    return pickle.loads(message, buffers=read_only(buffers))


def address(buffer: pickle.PickleBuffer) -> int:
    return np.frombuffer(buffer.raw(), np.uint8).ctypes.data


def test_a_batch_that_arrived_tells_its_size_and_names_without_a_copy():
    data = arrived(large())
    assert len(data) == 4
    with pytest.raises(AttributeError, match="columns: ids, log_probs, numbers, uid"):
        _ = data.nothing
    assert data.uid.tolist() == ["a", "b", "c", "d"]
    assert torch.equal(data.ids, large().ids)
    with pytest.raises(SchemaError, match="has no 'values'; it has: ids, log_probs"):
        data.select(["values"])
    assert {name: type(column) for name, column in data._tensor_columns.peek().items()} == {
        "ids": torch.Tensor,  # the one that was asked for
        "log_probs": UnreadColumn,
    }


def test_what_was_not_read_is_passed_on_from_where_it_lies():
    sent = large()
    _, buffers = dumps(arrived(sent).select(["ids"], []))
    assert address(buffers[0]) != sent.batch["ids"].data_ptr()  # was asked for, so it is a copy
    _, buffers = dumps(arrived(sent))
    lies_at = {column.data_ptr() for column in sent.batch.values()}
    assert lies_at <= {address(buffer) for buffer in buffers}


def test_selected_columns_stay_shared_with_the_batch_they_were_selected_from():
    data = arrived(large())
    selected = data.select(["ids"])
    selected.batch["ids"] += 1
    assert torch.equal(data.batch["ids"], large().batch["ids"] + 1)
    assert torch.equal(data.batch["log_probs"], large().batch["log_probs"])
    # columns passed on after that are the changed ones
    again = arrived(large())
    again.select(["ids"]).batch["ids"].zero_()
    assert not pickle.loads(pickle.dumps(again)).batch["ids"].any()


def test_another_batch_may_take_the_place_of_one_that_was_not_read():
    data = arrived(large())
    data.batch = four_rows().batch
    assert same_tensors(dict(data.batch.items()), dict(four_rows().batch.items()))
    assert same_tensors(dict(pickle.loads(pickle.dumps(data)).batch.items()), dict(four_rows().batch.items()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[2, 3], [0, 2], [2, 0], [0, 0], [1, 1, 1]])
def test_joining_what_arrived_is_joining_what_was_sent(dtype: torch.dtype, rows: list[int]):
    parts = [DataProto.from_dict({"x": random_tensor(dtype, (n, 3), seed=n)}) for n in rows]
    joined = DataProto.concat([arrived(part) for part in parts])
    assert same(joined, DataProto.concat(parts))
    assert joined.batch.batch_size == (sum(rows),)
    mixed = DataProto.concat([parts[0], *map(arrived, parts[1:])])
    assert same(mixed, DataProto.concat(parts))
    joined.batch["x"].zero_()  # into memory of its own
    assert same(DataProto.concat(parts), DataProto.concat([arrived(part) for part in parts]))


def test_joining_refuses_what_does_not_fit_and_says_what_arrived():
    floats, ints = (DataProto.from_dict({"x": torch.ones(2, 3, dtype=d)}) for d in (torch.float32, torch.int64))
    for parts in ([arrived(floats), arrived(ints)], [floats, arrived(ints)], [arrived(floats), ints]):
        with pytest.raises(SchemaError, match=r"'x' is float32 \(2, 3\) in batch 0 and int64 \(2, 3\) in batch 1"):
            DataProto.concat(parts)


def test_threads_that_read_at_once_read_one_copy():
    sent = DataProto.from_dict({"x": torch.arange(1 << 12).view(4, -1) + 1, "y": torch.ones(4)})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            data = arrived(sent)
            ways = [
                lambda d: d.batch["x"],
                lambda d: d.x,
                lambda d: d.select(["x"]).batch["x"],
                lambda d: d.chunk(1)[0].x,
            ]
            barrier = threading.Barrier(len(ways))

            def clear(row: int, data=data, ways=ways, barrier=barrier):
                barrier.wait()
                ways[row](data)[row] = 0

            with ThreadPoolExecutor(len(ways)) as pool:
                list(pool.map(clear, range(len(ways))))
            assert not data.batch["x"].any()
    finally:
        sys.setswitchinterval(interval)


def test_what_arrived_is_let_go_when_another_batch_takes_its_place(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    message, buffers = dumps(large().select(["ids"], []))
    memory = np.frombuffer(buffers[0].raw(), np.uint8)
    alive = weakref.ref(memory)
    data = pickle.loads(message, buffers=[memory])
    del memory
    assert alive() is not None
    data.batch = four_rows().batch
    assert len(data) == 4
    assert alive() is None


def test_one_part_that_arrived_is_copied_when_joined():
    sent = large()
    DataProto.concat([arrived(sent)]).batch["ids"].zero_()
    assert same(sent, large())


def test_nested_columns_of_a_tensordict_travel():
    jagged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    inner = TensorDict({"half": torch.ones(2, 3, dtype=torch.bfloat16)}, batch_size=[2])
    sent = TensorDict({"ids": jagged, "inner": inner, "plain": torch.tensor([1.0, 2.0])}, batch_size=[2])
    warnings.simplefilter("ignore")  # PyTorch's about nested tensors of strided layout
    sent["strided"] = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)])
    sent["note"] = NonTensorData("same for all", batch_size=[2])
    arrived = deserialize_tensordict(pickle.loads(pickle.dumps(serialize_tensordict(sent))))
    assert [row.tolist() for row in arrived["ids"].unbind()] == [[0, 1], [0, 1, 2]]
    assert [row.tolist() for row in arrived["strided"].unbind()] == [[0, 1, 2], [0]]
    assert torch.equal(arrived["inner", "half"], inner["half"])
    assert (arrived["plain"].tolist(), arrived["note"]) == ([1.0, 2.0], "same for all")
    assert arrived.batch_size == (2,)
