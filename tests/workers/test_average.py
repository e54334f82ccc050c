"""Averages of trained weights: by hand, inside the model and out of it, and in checkpoints of one and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.support import make_engine, run_ranks, weights_of
from verl.checkpoint.ranks import save_together
from verl.errors import CheckpointError
from verl.testing.models import tiny_model_dir
from verl.utils.sharded_tensor import local_rows
from verl.workers.teacher.average import AveragedWeights, without_average


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[name], weight) for name, weight in one.items())


def average_and_save(rank: int, world_size: int, folder: Path, model_dtype: str = "fp32") -> None:
    engine = make_engine(str(folder / "model"), model_dtype=model_dtype)
    average, start = AveragedWeights(engine, decay=0.75), weights_of(engine)
    with torch.no_grad():
        for weight in engine.trained_weights().values():
            local_rows(weight)[0].add_(4.0)
    trained = weights_of(engine)
    average.update()
    # 3/4 of the start and 1/4 of what is 4 more.
    with average.in_model():
        found = weights_of(engine)
    atol = 1e-5 if model_dtype == "fp32" else 0.05
    assert all(torch.allclose(found[name], start[name] + 1.0, atol=atol) for name in start)
    assert equal(weights_of(engine), trained)
    last = list(average._average)[-1]
    shaped = average._average[last]
    average._average[last] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="size of tensor"), average.in_model():  # after all other weights
        pass
    average._average[last] = shaped
    assert equal(weights_of(engine), trained)
    state = average.added_to(engine.state(contents=["model"]))
    assert without_average(state.states).keys() == engine.state(contents=["model"]).states.keys()
    save_together(folder / "saved", state.write)
    average.update()
    average.restore(state.states)
    with average.in_model():
        assert equal(weights_of(engine), found)
    if rank == 0:
        torch.save(found, folder / "average.pt")


def load_and_compare(rank: int, world_size: int, folder: Path) -> None:
    engine = make_engine(str(folder / "model"))
    average = AveragedWeights(engine, decay=0.75)
    average.load(folder / "saved")
    with average.in_model():
        assert equal(weights_of(engine), torch.load(folder / "average.pt"))
    engine.load_checkpoint(str(folder / "saved"), ["model"])
    with pytest.raises(CheckpointError):
        average.load(folder / "model")


@pytest.mark.parametrize("model_dtype", ["fp32", "bf16"])
def test_a_model_computes_with_the_average_and_has_its_own_weights_afterwards(tmp_path, model_dtype):
    tiny_model_dir(tmp_path / "model")
    average_and_save(0, 1, tmp_path, model_dtype)


@pytest.mark.slow
def test_an_average_is_saved_by_two_ranks_and_read_by_one(tmp_path):
    tiny_model_dir(tmp_path / "model")
    run_ranks(average_and_save, 2, tmp_path)
    (tmp_path / "store").unlink()
    run_ranks(load_and_compare, 1, tmp_path)
