"""Steps as verl 0.8 saves them under FSDP and FSDP2 on two ranks, made by PyTorch's own sharded tensors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import tests.forks  # noqa: F401 - its fork server has loaded the libraries
from tests.support.public_checkpoint import save_public_checkpoint
from tests.support.tiny_run import make_tiny_run, overrides
from tests.workers.support import make_engine, run_ranks, weights_of
from verl.checkpoint.shards import read_shards, read_state
from verl.errors import CheckpointError
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils.sharded_tensor import local_rows


@pytest.fixture(scope="module", params=["fsdp", "fsdp2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: model, data, global_step_2, and the same state in one piece."""
    root = tmp_path_factory.mktemp(request.param)
    tied = request.param == "fsdp2"
    paths = make_tiny_run(root)
    tiny_model_dir(root / "model", tie_word_embeddings=tied)
    save_public_checkpoint(paths["model"], root / "checkpoints", request.param)
    return root


def check_the_state(rank: int, world_size: int, folder: Path, saved: Path) -> None:
    """Each rank has its rows of the state in one piece, and the run's own learning rate."""
    engine = make_engine(str(saved / "model"), optimizer={"lr": 0.5})
    engine.load_checkpoint(str(saved / "checkpoints" / "global_step_2" / "actor"))
    whole = torch.load(saved / "checkpoints" / "whole.pt")
    for name, weight in weights_of(engine).items():
        assert_close(weight, whole["weights"][name], msg=name, atol=2e-5, rtol=0)
    parameters = dict(engine.model.named_parameters())
    assert len(parameters) == len(whole["weights"])
    for name, parameter in parameters.items():
        state = engine.optimizer.state[parameter]
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert int(state["step"]) == 2
        for key in ("exp_avg", "exp_avg_sq"):
            rows, first = local_rows(state[key])
            assert (len(rows) < len(parameter)) == (world_size == 2)
            moments = whole["moments"][f"{name}/{key}"][first : first + len(rows)]
            assert_close(rows, moments, msg=f"{name}/{key}", atol=1e-5, rtol=1e-3)
    assert engine.scheduler.last_epoch == 2
    assert engine.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_moments_and_step_are_taken_over(saved: Path, tmp_path: Path, ranks: int):
    if ranks == 1:
        check_the_state(0, 1, tmp_path, saved)
    else:
        run_ranks(check_the_state, ranks, tmp_path, saved)


@pytest.mark.slow
def test_a_run_goes_on_from_it(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    shutil.copytree(saved, tmp_path / "run")
    root = tmp_path / "run"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    names = {name: str(root / f"{name}.jsonl") for name in ("train", "val")}
    paths = {"model": str(root / "model"), "reward_model": str(root / "reward_model")} | names
    run_ppo(compose(overrides(paths, root, trainer__total_training_steps=3, trainer__save_freq=0)))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1  # step 3
    assert (root / "checkpoints" / "global_step_3" / "manifest.json").exists()
    assert "saved by verl 0.8 under FSDP" in caplog.text
    assert "2 batches of this run's order are skipped" in caplog.text


def test_the_merger_reads_it(saved: Path, tmp_path: Path):
    actor = saved / "checkpoints" / "global_step_2" / "actor"
    merge(actor, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    weights = torch.load(saved / "checkpoints" / "whole.pt")["weights"]
    assert merged.keys() <= weights.keys()
    assert weights.keys() - merged.keys() <= {"lm_head.weight"}  # tied to the embeddings
    for name, weight in merged.items():
        assert_close(weight, weights[name], msg=name, atol=2e-5, rtol=0)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch HACKED",)


class Attribute:
    """What the files use getattr for, on something else."""

    def __reduce__(self):
        return getattr, (torch.Tensor, "__init__")


@pytest.mark.parametrize("program", [Malicious(), Attribute()], ids=["call", "getattr"])
def test_code_in_a_file_is_refused(saved: Path, tmp_path: Path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    actor = shutil.copytree(saved / "checkpoints" / "global_step_2" / "actor", tmp_path / "actor")
    name = actor / "model_world_size_2_rank_1.pt"
    state = {"model.norm.weight": torch.ones(4), "more": program}
    torch.save(state, name)
    with pytest.raises(CheckpointError, match=r"model_world_size_2_rank_1.pt cannot be read \(UnpicklingError"):
        read_state(name)
    assert not (tmp_path / "HACKED").exists()


def test_what_is_no_such_checkpoint_says_so(tmp_path: Path):
    torch.save({"weights": [1, 2]}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"'weights' is a list, not a tensor"):
        read_shards(tmp_path, "model", 1)
