"""When a run copies its state into memory: by the time that copies take, and the room for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from verl.trainer import recovery
from verl.trainer.recovery import SnapshotSchedule


@dataclass
class Ranks:
    """Ranks with states of some bytes, and the size of Ray's object stores."""

    states: list[int]
    store: int

    def snapshot_bytes(self) -> list[int]:
        return self.states

    def held_bytes_limit(self) -> int:
        return self.store


ROOMY = {"actor": Ranks([10, 10], 100)}


def snapshots(
    schedule: SnapshotSchedule, monkeypatch: pytest.MonkeyPatch, steps: list[float], took: float
) -> list[int]:
    """After which steps of so many seconds a snapshot is taken, if one takes ``took`` seconds."""
    now, found = 0.0, []
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now)
    for number, seconds in enumerate([0.0, *steps]):
        now += seconds
        if schedule.is_due(number, ROOMY):
            found.append(number)
            now += took
            schedule.record(took)
    return found


def test_snapshots_take_two_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # One of 0.1 s is due again after 5 s: with steps of 6 s each time, with steps of 2 s after each third.
    assert snapshots(SnapshotSchedule(None), monkeypatch, [6.0] * 4, 0.1) == [0, 1, 2, 3, 4]
    assert snapshots(SnapshotSchedule(None), monkeypatch, [2.0] * 7, 0.1) == [0, 3, 6]


def test_a_given_frequency_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshots(SnapshotSchedule(2), monkeypatch, [2.0] * 4, 9.0) == [0, 2, 4]
    assert snapshots(SnapshotSchedule(0), monkeypatch, [2.0] * 4, 0.0) == []


def test_two_snapshots_must_fit_into_the_store(caplog: pytest.LogCaptureFixture) -> None:
    """Two of 20 + 20 bytes fit into 80 % of 100 bytes, and of 99 do not."""
    models = {"actor": Ranks([10, 10], 100), "critic": Ranks([20], 100)}
    assert SnapshotSchedule(None).is_due(0, models)
    assert not caplog.records
    schedule = SnapshotSchedule(None)
    with caplog.at_level(logging.WARNING):
        small = {name: Ranks(ranks.states, 99) for name, ranks in models.items()}
        assert not schedule.is_due(0, small)
        assert not schedule.is_due(1, small)
    [record] = caplog.records
    assert "goes on from its newest checkpoint" in record.getMessage()
