"""Laws that hold for every batch."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.batches import batches, same
from verl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.protocol.columns import same_value

quick = settings(deadline=None, max_examples=60)
counts = st.integers(1, 5)


@quick
@given(batches(), counts)
def test_concat_undoes_chunk(data: DataProto, n: int):
    data.auto_padding = True
    parts = data.chunk(n)
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert same(DataProto.concat(parts), data)


@quick
@given(batches(min_rows=1), counts)
def test_concat_undoes_split(data: DataProto, n: int):
    assert same(DataProto.concat([*data.split(n), data[:0]]), data)


@quick
@given(batches(), counts)
def test_unpad_undoes_pad(data: DataProto, n: int):
    padded, pad_size = pad_dataproto_to_divisor(data, n)
    assert len(padded) % n == 0
    assert 0 <= pad_size < n
    assert same(unpad_dataproto(padded, pad_size), data)


@quick
@given(batches(), counts)
def test_repeated_rows_are_the_rows(data: DataProto, n: int):
    assert same(data.repeat(n)[::n], data)
    for repeated in data.repeat(n, interleave=False).chunk(n):
        assert same(repeated, data)
    assert same(data.repeat(n), data.sample_level_repeat([n] * len(data)))


@quick
@given(batches(), st.randoms())
def test_reorder_permutes(data: DataProto, random):
    order = list(range(len(data)))
    random.shuffle(order)
    inverse = np.argsort(order).tolist()
    ordered = data.select()
    ordered.reorder(order)
    assert same(ordered, data[order])
    ordered.reorder(inverse)
    assert same(ordered, data)


@quick
@given(batches(), st.data())
def test_a_mask_means_its_rows(data: DataProto, draw: st.DataObject):
    mask = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    assert same(data[np.array(mask, dtype=bool)], data[[row for row, kept in enumerate(mask) if kept]])


@quick
@given(batches(min_rows=1), st.data())
def test_union_of_a_partition_of_columns_is_the_batch(data: DataProto, draw: st.DataObject):
    keys = list(data.batch.keys())
    left = draw.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    a = data.select(batch_keys=left)
    b = data.select(batch_keys=[key for key in keys if key not in left])
    assert same((a | b).select(batch_keys=keys), data)
    assert same(b | a, data)
    # union commutes with choosing rows
    assert same(a[::2] | b[::2], (a | b)[::2])
    # and with choosing columns
    assert same((a | b).select(batch_keys=left), a)


@quick
@given(batches())
def test_a_batch_unites_with_itself_and_its_copy(data: DataProto):
    assert same(data | data, data)
    assert same(data | copy.deepcopy(data), data)
    assert same_value(data.meta_info, copy.deepcopy(data.meta_info))


@quick
@given(batches(), counts)
def test_unfold_undoes_fold(data: DataProto, n: int):
    data = data.repeat(n)
    if len(data):
        assert same(unfold_batch_dim(fold_batch_dim(data, len(data) // n)), data)


@quick
@given(batches(min_rows=1))
def test_collating_the_rows_gives_the_batch(data: DataProto):
    objects = {key: column.astype(object) for key, column in data.non_tensor_batch.items()}
    if len(data):
        assert same(collate_fn(list(data)), DataProto(data.batch, objects, data.meta_info))


@quick
@given(batches(), st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_pickle_keeps_everything(data: DataProto, protocol: int):
    assert same(pickle.loads(pickle.dumps(data, protocol)), data)
    for other in (copy.copy(data), copy.deepcopy(data)):
        assert same(other, data)


@quick
@given(batches())
def test_tensordicts_keep_rows_and_columns(data: DataProto):
    data = data.select(meta_info_keys=[])
    data.non_tensor_batch = {key: column.astype(object) for key, column in data.non_tensor_batch.items()}
    if data.batch.keys() or data.non_tensor_batch:
        assert same(DataProto.from_tensordict(data.to_tensordict()), data)


@quick
@given(batches(min_rows=1), st.integers(0, 10))
def test_shuffled_mini_batches_are_a_permutation(data: DataProto, seed: int):
    data = data | DataProto.from_dict({"row": torch.arange(len(data) or 1)})
    parts = data.make_iterator(1, 1, seed=seed, dataloader_kwargs={"shuffle": True})
    joined = DataProto.concat(list(parts))
    joined.reorder(joined.batch["row"].argsort())
    assert same(joined, data)
