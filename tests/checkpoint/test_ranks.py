"""Ranks that write one folder, errors that all ranks see, random generators that go on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from verl.checkpoint.ranks import RankState, on_all_ranks, save_together
from verl.checkpoint.states import rng_state, set_rng_state
from verl.errors import CheckpointError
from verl.utils.device import ensure_process_group

CPU = torch.device("cpu")


def full():
    raise OSError("No space left on device")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    ensure_process_group(CPU)
    place = tmp_path / "save"

    def write(partial, text):
        (partial / "a").write_text(text)
        assert not place.exists() or (place / "a").read_text() == "1"

    save_together(place, lambda partial: write(partial, "1"))
    assert (place / "a").read_text() == "1"
    save_together(place, lambda partial: write(partial, "2"))
    assert (place / "a").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_a_folder_stays_where_its_successor_cannot_be_written(tmp_path):
    ensure_process_group(CPU)
    save_together(tmp_path / "save", lambda partial: (partial / "a").write_text("1"))
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*save: .*No space.*\(rank 0\)"):
        save_together(tmp_path / "save", lambda _: full())
    assert (tmp_path / "save" / "a").read_text() == "1"


def test_files_of_a_killed_save_are_not_taken_for_those_of_the_next(tmp_path):
    ensure_process_group(CPU)
    (tmp_path / ".rank_0").mkdir()
    (tmp_path / ".rank_0" / "model-00002.safetensors.partial").write_text("1")
    state = RankState({}, lambda folder: (folder / "config.json").touch())
    assert state.write(tmp_path).keys() == {"config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_error_is_raised_with_the_task_and_the_rank():
    ensure_process_group(CPU)
    with pytest.raises(CheckpointError, match=r"cannot write x: .*No space.*\(rank 0\)"), on_all_ranks("write x"):
        raise OSError("No space left on device")
    with pytest.raises(CheckpointError, match="division by zero"), on_all_ranks("write x"):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), on_all_ranks("write x"):
        raise KeyboardInterrupt


def test_all_random_numbers_continue(tmp_path):
    def draw():
        return torch.rand(2).tolist() + np.random.rand(2).tolist() + [random.random(), random.gauss(0, 1)]

    random.gauss(0, 1)  # leaves a second number in store
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draw()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected
