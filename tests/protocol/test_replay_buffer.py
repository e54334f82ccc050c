"""Trajectories with age and priority: what is drawn, what is dropped, and that a saved buffer goes on."""

from __future__ import annotations

import pytest
import torch

from tests.protocol.batches import four_rows, same
from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.protocol.replay_buffer import ReplayBuffer


def drawn(buffer: ReplayBuffer, size: int, step: int = 0) -> list[int]:
    return buffer.sample(size, step).ids.tolist()


def test_rows_come_back_as_they_were_with_their_ages():
    buffer = ReplayBuffer(capacity=10)
    assert buffer.add(four_rows(), step=3).tolist() == [0, 1, 2, 3]
    found = buffer.sample(4, step=5)
    assert sorted(found.ids.tolist()) == [0, 1, 2, 3]
    assert found.ages.tolist() == [2] * 4
    rows = four_rows().select(meta_info_keys=[]).select_idxs(found.ids)
    assert same(found.batch, rows)


def test_probabilities_follow_priorities():
    buffer = ReplayBuffer(capacity=4, alpha=2.0)
    buffer.add(four_rows(), step=0, priorities=[1.0, 2.0, 0.0, 3.0])
    # weights 1, 4, 0, 9: shares 1/14, 4/14, 0, 9/14
    counts = torch.bincount(buffer.sample(20_000, 0, replacement=True).ids, minlength=4) / 20_000
    torch.testing.assert_close(counts, torch.tensor([1, 4, 0, 9]) / 14, rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="4 rows cannot be drawn from 3 rows with a priority above 0"):
        buffer.sample(4, 0)
    buffer.set_priorities([2, 3], [5.0, 0.0])
    assert sorted(drawn(buffer, 3)) == [0, 1, 2]


def test_the_lowest_priority_leaves_first_and_the_oldest_among_equals():
    buffer = ReplayBuffer(capacity=5)
    buffer.add(four_rows(), step=0, priorities=[2.0, 1.0, 1.0, 3.0])
    buffer.add(four_rows(), step=1)  # with the highest priority there is, 3
    assert buffer.ids.tolist() == [3, 4, 5, 6, 7]  # 1 and 2 (priority 1) and 0 (priority 2) are gone
    buffer.add(four_rows(), step=2, priorities=[3.0, 0.5, 0.5, 0.5])
    assert buffer.ids.tolist() == [4, 5, 6, 7, 8]
    buffer.set_priorities([0, 8], [9.0, 4.0])  # row 0 is gone: ignored
    assert buffer.priorities.tolist() == [3.0, 3.0, 3.0, 3.0, 4.0]


def test_old_rows_leave():
    buffer = ReplayBuffer(capacity=100, max_age=2)
    for step in range(4):
        buffer.add(four_rows(), step)
    assert buffer.ages(3).tolist() == [2] * 4 + [1] * 4 + [0] * 4
    assert set(drawn(buffer, 4, step=5)) == {12, 13, 14, 15}
    assert len(buffer) == 4
    with pytest.raises(ValueError, match="1 rows cannot be drawn from 0"):
        buffer.sample(1, step=6)


def test_a_saved_buffer_draws_what_the_first_would_have_drawn(tmp_path):
    buffer = ReplayBuffer(capacity=6, max_age=9, alpha=0.5, seed=1)
    buffer.add(four_rows(), step=0, priorities=[1.0, 2.0, 3.0, 4.0])
    drawn(buffer, 2)
    buffer.save(tmp_path / "replay")
    again = ReplayBuffer.load(tmp_path / "replay")
    for step in range(1, 4):
        for one in (buffer, again):
            one.add(four_rows(), step)
        first, second = buffer.sample(5, step), again.sample(5, step)
        assert same(first.batch, second.batch)
        assert torch.equal(first.ids, second.ids)
        assert torch.equal(buffer.priorities, again.priorities)
    ReplayBuffer(capacity=3).save(tmp_path / "empty")
    assert len(ReplayBuffer.load(tmp_path / "empty")) == 0
    four_rows().save_to_disk(tmp_path / "batch")
    with pytest.raises(SchemaError, match="a batch and no replay buffer"):
        ReplayBuffer.load(tmp_path / "batch")


def test_what_does_not_fit_is_refused():
    buffer = ReplayBuffer(capacity=4)
    batch = four_rows()
    buffer.add(batch, step=0)
    batch.batch["score"].zero_()  # later writes into the batch do not reach the buffer
    assert sorted(buffer.sample(4, 0).batch.batch["score"].tolist()) == [0.5, 1, 2, 4]
    with pytest.raises(SchemaError, match="'responses' is missing"):
        buffer.add(four_rows().select(batch_keys=["score"]), step=1)
    with pytest.raises(SchemaError, match="finite and at least 0"):
        buffer.set_priorities([0], [float("nan")])
    with pytest.raises(SchemaError, match="ids are 0 to 3, got 7 to 7"):
        buffer.set_priorities([7], [1.0])
    with pytest.raises(ValueError, match="capacity=0"):
        ReplayBuffer(capacity=0)
    assert isinstance(buffer.sample(1, 0).batch, DataProto)
