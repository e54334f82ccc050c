"""Batches to test with: a literal one, random ones, and what it means that two are the same."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.protocol.columns import object_array, same_value

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def four_rows() -> DataProto:
    return DataProto.from_dict(
        tensors={"responses": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), "score": torch.tensor([0.5, 1, 2, 4])},
        non_tensors={"uid": ["a", "a", "b", "b"], "raw_prompt": [[1], [2], [3], [4]]},
        meta_info={"global_steps": 3},
    )


def same(a: DataProto, b: DataProto) -> bool:
    """Equal columns with equal dtypes, equal rows, equal meta_info."""
    if len(a) != len(b) or not same_tensordicts(a.batch, b.batch):
        return False
    dtypes = [{key: column.dtype for key, column in part.non_tensor_batch.items()} for part in (a, b)]
    return (
        dtypes[0] == dtypes[1]
        and same_value(a.non_tensor_batch, b.non_tensor_batch)
        and same_value(a.meta_info, b.meta_info)
    )


def same_tensordicts(a: TensorDict, b: TensorDict) -> bool:
    return a.batch_size == b.batch_size and same_tensors(dict(a.items()), dict(b.items()))


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, so that NaN payloads and dtypes without arithmetic compare too."""

    def bits(tensor: torch.Tensor) -> tuple:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()

    return a.keys() == b.keys() and all(bits(a[key]) == bits(b[key]) for key in a)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7) -> DataProto:
    """Any batch: with or without rows, tensors, objects, arrays of numbers, meta_info."""
    rows = draw(st.integers(min_rows, max_rows))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), max_size=3, unique=True))
    shapes = draw(st.lists(st.sampled_from([(), (3,), (2, 2), (0,)]), min_size=3, max_size=3))
    tensors = {
        f"tensor_{dtype}": random_tensor(dtype, (rows, *shape), i)
        for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=False))
    }
    non_tensors: dict[str, np.ndarray] = {}
    if draw(st.booleans()):
        non_tensors["objects"] = object_array(draw(st.lists(values, min_size=rows, max_size=rows)))
    if draw(st.booleans()):
        non_tensors["numbers"] = np.arange(rows).astype(draw(st.sampled_from(["int32", "float64", "bool"])))
    if draw(st.booleans()):
        non_tensors["texts"] = np.array([f"row {i}" for i in range(rows)], dtype="<U9")
    return DataProto.from_dict(tensors, non_tensors, draw(st.dictionaries(st.text(max_size=3), values, max_size=2)))
