"""A checkpoint written as verl itself saves under FSDP2, read by a loader written from the documented layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.workers.support import make_engine, run_ranks
from verl.checkpoint.shards import assemble, read_shards
from verl.errors import CheckpointError
from verl.model_merger.__main__ import main
from verl.model_merger.verl_fsdp import export
from verl.testing.models import tiny_model_dir


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours after two steps, of a model whose embeddings are tied."""
    root = tmp_path_factory.mktemp("saved")
    tiny_model_dir(root / "model", tie_word_embeddings=True)
    engine = make_engine(str(root / "model"), optimizer={"lr": 0.25})
    for step in range(2):
        torch.manual_seed(step)
        for parameter in engine.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        engine.optimizer.step()
        engine.lr_scheduler_step()
    engine.save_checkpoint(str(root / "actor"), global_step=2)
    return root


def load_as_verl_does(rank: int, world_size: int, folder: Path, target: Path, source: Path) -> None:
    """Load every file by the documented calls, and compare with what was saved, bit by bit."""
    model = AutoModelForCausalLM.from_pretrained(source / "model", dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    files = {
        kind: torch.load(target / f"{kind}_world_size_{world_size}_rank_{rank}.pt", weights_only=False)
        for kind in ("model", "optim", "extra_state")
    }
    model.load_state_dict(files["model"])
    optimizer.load_state_dict(files["optim"])
    scheduler.load_state_dict(files["extra_state"]["lr_scheduler"])
    rng = files["extra_state"]["rng"]
    torch.set_rng_state(rng["cpu"])
    np.random.set_state(rng["numpy"])
    random.setstate(rng["random"])
    weights, moments = read_shards(source / "actor", "model", 1), read_shards(source / "actor", "optim", 1)
    named = dict(model.named_parameters())
    assert len(named) == len(weights[0]["shapes"])
    for name, parameter in named.items():
        rows = weights[0]["shapes"][name][0]
        assert torch.equal(parameter.full_tensor(), assemble(weights, name, 0, rows)), name
        state = optimizer.state[parameter]
        assert int(state["step"]) == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key].full_tensor(), assemble(moments, f"{name}/{key}", 0, rows)), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scheduler.last_epoch == 2
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()  # the state is one that the optimizer can go on from
    assert int(optimizer.state[next(iter(named.values()))]["step"]) == 3


@pytest.mark.parametrize("ranks", [2, 1])
def test_the_documented_loader_reads_it(saved: Path, tmp_path: Path, ranks: int):
    target = tmp_path / "actor"
    assert main(["merge", str(saved / "actor"), "--to", "verl-fsdp", f"--target_dir={target}", f"--ranks={ranks}"]) == 0
    assert json.loads((target / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": ranks}
    assert (target / "huggingface" / "config.json").is_file()
    run_ranks(load_as_verl_does, ranks, tmp_path, target, saved)


def test_our_reader_of_that_format_gives_back_every_number(saved: Path, tmp_path: Path):
    target = tmp_path / "actor"
    assert main([str(saved / "actor"), "--to", "verl-fsdp", f"--target_dir={target}", "--ranks=3"]) == 0
    ours = {kind: read_shards(saved / "actor", kind, 1) for kind in ("model", "optim")}
    trained = ours["model"][0]["shapes"].keys()
    for kind, shards in ours.items():
        theirs = read_shards(target, kind, 3, trained)
        assert len(theirs) == 3
        for name, shape in shards[0]["shapes"].items():
            assert torch.equal(assemble(theirs, name, 0, shape[0]), assemble(shards, name, 0, shape[0])), name
        assert theirs[0].get("other", {}).keys() == shards[0].get("other", {}).keys()
    tied = torch.load(target / "model_world_size_3_rank_0.pt", weights_only=True)
    assert torch.equal(tied["lm_head.weight"].to_local(), tied["model.embed_tokens.weight"].to_local())
    # A run of ours goes on from it.
    engine = make_engine(str(saved / "model"), optimizer={"lr": 0.25})
    engine.load_checkpoint(str(target))
    assert engine.scheduler.last_epoch == 2


def test_what_cannot_be_written_says_so(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    arguments = [str(saved / "actor"), "--to", "verl-fsdp", "--target_dir"]
    assert main([*arguments, str(tmp_path / "there")]) == 1
    assert "is there already. Name a folder that does not exist" in caplog.text
    with pytest.raises(SystemExit):
        main([*arguments, str(tmp_path / "new"), "--ranks", "0"])
    with pytest.raises(CheckpointError, match=r"fsdp_config\.json is missing"):
        export(tmp_path / "there", tmp_path / "new")
