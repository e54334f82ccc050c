"""Large results stay in Ray's object store: the driver passes on references, and the numbers are those of values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.protocol.batches import same
from tests.single_controller.workers import Columns
from tests.support.waiting import eventually
from verl.errors import ProcessLostError, WorkerError
from verl.protocol import DataProto, replace_columns
from verl.protocol.stored import Origin, StoredColumn, by_reference
from verl.protocol.tensor_columns import TensorColumns


@pytest.fixture(scope="module")
def groups(pool):
    """Two groups of two ranks each; the first makes columns, the second looks at them."""
    from verl.single_controller.ray import RayWorkerGroup, split_resource_pool

    made = [
        RayWorkerGroup(p, RayWorkerGroup.describe(Columns), device_name="cpu") for p in split_resource_pool(pool, 2)
    ]
    yield made
    for group in made:
        group.shutdown()


@pytest.fixture
def made(groups) -> DataProto:
    return groups[0].make(DataProto.from_dict({"number": torch.arange(8)}))


def stored_in(batch: DataProto) -> set[str]:
    return {key for key, column in batch._tensor_columns.peek().items() if isinstance(column, StoredColumn)}


def by_value(batch: DataProto) -> DataProto:
    """The same columns, of which Ray's object store has nothing."""
    return DataProto.from_dict({key: column.clone() for key, column in batch.batch.items()})


def bytes_sent(batch: DataProto) -> int:
    """Bytes of the columns that travel with a call by value."""
    buffers: list[pickle.PickleBuffer] = []
    with by_reference():
        columns = batch._tensor_columns.wire()[1].values()
    pickle.dumps([c for c in columns if not isinstance(c, StoredColumn)], protocol=5, buffer_callback=buffers.append)
    return sum(buffer.raw().nbytes for buffer in buffers)


ORDERS = {
    "of the ranks": range(8),
    "reversed": range(7, -1, -1),
    "repeated": [3, 3, 0, 7, 5, 3],
    "of one rank": [6, 4],
    "of nobody's rows but two": [1, 6],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("read_before", [False, True])
def test_a_rank_gets_the_rows_that_were_chosen(groups, made, order, read_before):
    if read_before:
        assert made.batch["ids"][5, 3] == 5003
    chosen = made.select_idxs(list(order))
    assert stored_in(chosen) == {"ids", "halves", "flags", "nothing"}
    assert bytes_sent(chosen) == 0
    seen = groups[1].look(chosen)
    assert seen.batch["first"].tolist() == [1000 * number for number in order]
    assert same(seen, groups[1].look(by_value(chosen)))
    assert bytes_sent(by_value(chosen)) == sum(column.nbytes for column in chosen.batch.values())


def test_columns_of_several_calls_and_of_the_driver_are_one_batch(groups, made):
    twice = DataProto.concat([made, made.select_idxs([2, 1])])
    own = DataProto.from_dict({"advantages": torch.arange(20.0).view(10, 2)})
    batch = (twice | own).select(batch_keys=["ids", "flags", "advantages"])
    assert stored_in(batch) == {"ids", "flags"}
    assert bytes_sent(batch) == 80
    seen = groups[1].look(batch)
    assert seen.batch["first"].tolist() == [0, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 2000, 1000]
    assert seen.batch["advantages_sum"].tolist() == [1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0, 33.0, 37.0]
    other = replace_columns(batch, DataProto.from_dict({"flags": torch.zeros(10, dtype=torch.bool)}))
    assert stored_in(other) == {"ids"}
    assert not groups[1].look(other).batch["flags"].any()


def test_what_the_driver_has_written_is_what_ranks_get(groups, made):
    kept = made.select_idxs([0, 1])
    view = made.slice(2, 4)
    view.batch["ids"][0, 0] = -1  # row 2 of the batch, whose memory the slice shares
    made.batch["flags"].zero_()
    assert stored_in(made) == {"halves", "nothing"}
    seen = groups[1].look(made)
    assert seen.batch["first"].tolist() == [0, 1000, -1, 3000, 4000, 5000, 6000, 7000]
    assert not seen.batch["flags"].any()
    assert groups[1].look(kept).batch["flags"].tolist() == [True, False]  # chosen before
    replaced = made.select()
    replaced.batch["halves"] = torch.ones(8, 3)
    assert groups[1].look(replaced).batch["halves_sum"].tolist() == [3.0] * 8


def test_writes_that_torch_does_not_count_are_found(groups, made):
    made.batch["ids"].numpy()[1, 0] = -1
    made.batch["flags"].data.zero_()
    assert stored_in(made) == {"ids", "halves", "flags", "nothing"}  # nobody has looked at their bytes yet
    kept = made.select_idxs([0, 1, 2, 3])
    made.batch["ids"].numpy()[2, 0] = -2
    seen = groups[1].look(made)
    assert seen.batch["first"].tolist() == [0, -1, -2, 3000, 4000, 5000, 6000, 7000]
    assert not seen.batch["flags"].any()
    assert groups[1].look(kept).batch["first"].tolist() == [0, -1, 2000, 3000]  # chosen before the second write


def test_rows_that_were_chosen_before_a_write_stay(groups, made):
    assert made.batch["ids"][0, 0] == 0
    kept = made.select_idxs([1, 0])
    made.batch["ids"].numpy()[1, 0] = -1
    assert groups[1].look(kept).batch["first"].tolist() == [1000, 0]
    assert kept.batch["ids"][0, 0] == 1000


def test_copies_and_pickles_outside_of_calls_have_the_values(made):
    assert stored_in(pickle.loads(pickle.dumps(made))) == set()
    assert same(pickle.loads(pickle.dumps(made)), made)
    assert same(copy.deepcopy(made), made)
    assert made.select(batch_keys=["ids"]).batch["ids"] is made.batch["ids"]


def test_small_results_travel_as_values(groups):
    seen = groups[0].look(DataProto.from_dict({"ids": torch.ones(2, 3), "flags": torch.zeros(2)}))
    assert stored_in(seen) == set()


def test_results_outlive_the_rank_that_made_them(groups, pool):
    from verl.single_controller.ray import RayWorkerGroup, split_resource_pool

    makers = RayWorkerGroup(split_resource_pool(pool, 2)[0], RayWorkerGroup.describe(Columns), device_name="cpu")
    batch = makers.make(DataProto.from_dict({"number": torch.arange(4)}))
    with pytest.raises(WorkerError):
        makers.die()
    makers.shutdown()
    assert groups[1].look(batch.select_idxs([3, 0])).batch["first"].tolist() == [3000, 0]


@pytest.mark.slow  # Ray's store clears up after the dead with a delay of many seconds
def test_a_result_that_is_gone_is_a_lost_process(groups, pool):
    from verl.single_controller.ray import RayWorkerGroup, split_resource_pool

    makers = RayWorkerGroup(split_resource_pool(pool, 2)[0], RayWorkerGroup.describe(Columns), device_name="cpu")
    made = makers.make_and_keep(8)[0]  # owned by its rank, so it ends with it, as others end with their node
    with pytest.raises(WorkerError):
        makers.die()
    makers.shutdown()
    flags = DataProto.from_dict({"flags": torch.zeros(8)})

    def look() -> str:
        column = StoredColumn(Origin.from_result(made, "ids", 8), torch.int64, [8, 40_000])
        try:
            groups[1].look(flags | DataProto(TensorColumns([8], {"ids": column})))
        except ProcessLostError as error:
            return str(error)
        return ""

    # The store clears up after the dead with a delay.
    assert "OwnerDiedError" in eventually(look, "the result is gone")
