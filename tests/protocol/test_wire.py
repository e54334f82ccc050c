"""Batches cross processes without needless copies, and stay their owner's."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from tests.protocol.batches import DTYPES, four_rows, random_tensor, same, same_tensors
from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

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


def test_columns_travel_out_of_band_and_uncopied():
    data = large()
    message, buffers = dumps(data)
    assert len(message) < 2000
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [LARGE * 8, LARGE * 8, LARGE * 32]
    sent = {np.frombuffer(buffer.raw(), np.uint8).ctypes.data for buffer in buffers}
    assert sent == {
        data.batch["ids"].data_ptr(), data.batch["log_probs"].data_ptr(), data.non_tensor_batch["numbers"].ctypes.data
    }  # fmt: skip


def test_a_part_sends_its_own_rows_alone():
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
    size, columns = serialize_tensordict(batch)
    assert size == (4,)
    received = deserialize_tensordict((size, columns))
    assert received.batch_size == (4,)
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
