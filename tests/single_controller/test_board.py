"""Boards: what workers post while they are in a call, as the driver reads it."""

from __future__ import annotations

import logging
import time

import pytest
import ray

from verl.single_controller.base.board import Board
from verl.single_controller.ray.board import RayBoard


def test_newest_values_in_one_process():
    board = Board()
    board.post(0, "a")
    board.post(1, "b")
    board.post(0, "c")
    taken = board.values()
    board.close()
    assert taken == {0: "c", 1: "b"}
    assert board.values() == {}


def test_values_of_another_process_and_of_a_board_that_has_died(
    ray_cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verl.single_controller.ray.board.READ_S", 60)
    board = RayBoard()

    @ray.remote(num_cpus=0)
    def post(there: RayBoard) -> None:
        for value in range(20):
            there.post(1, value)

    board.post(0, -1)
    ray.get(post.remote(board))
    ends = time.monotonic() + 60  # posts do not wait, so the last may still be under way
    while board.values() != {0: -1, 1: 19}:
        assert time.monotonic() < ends, board.values()
        time.sleep(0.01)
    board.close()
    board.post(0, 5)
    with caplog.at_level(logging.WARNING):
        assert board.values() == board.values() == {}
    assert caplog.text.count("cannot be read") == 1
