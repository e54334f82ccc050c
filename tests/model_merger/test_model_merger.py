"""Merging shards into a model folder, and comparing with one."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from tests import forks
from tests.workers.support import make_engine, weights_of
from verl.checkpoint.locate import backend_of, shards_below
from verl.model_merger.__main__ import main
from verl.testing.models import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint cut as three ranks would have, and the weights."""
    folder = tmp_path_factory.mktemp("merger")
    path = tiny_model_dir(folder / "model", "qwen3", tie_word_embeddings=request.param == "tied")
    engine = make_engine(path)
    engine.save_checkpoint(str(folder / "actor"))
    whole = torch.load(folder / "actor" / "model_world_size_1_rank_0.pt", weights_only=True)
    for rank in range(3):
        state = {"format": 1, "tensors": {}, "shapes": whole["shapes"], "first_rows": {}}
        for name, tensor in whole["tensors"].items():
            rows = -(-tensor.shape[0] // 3)
            state["tensors"][name] = tensor[rank * rows : (rank + 1) * rows].clone()
            state["first_rows"][name] = min(rank * rows, tensor.shape[0])
        torch.save(state, folder / "actor" / f"model_world_size_3_rank_{rank}.pt")
    (folder / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 3}))
    (folder / "actor" / "model_world_size_1_rank_0.pt").unlink()
    return folder, weights_of(engine)


def run(command, folder, *more):
    return main([command, "--backend", "fsdp", "--local_dir", str(folder), *more])


def test_merge_makes_the_same_model(checkpoint, tmp_path):
    folder, weights = checkpoint
    assert run("merge", folder / "actor", "--target_dir", str(tmp_path / "out")) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 104
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert run("test", folder / "actor", "--test_hf_dir", str(tmp_path / "out")) == 0


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_a_log_has_no_progress_bars(checkpoint, tmp_path):
    folder, _ = checkpoint
    words = ["--backend", "fsdp", "--local_dir", str(folder / "actor"), "--target_dir", str(tmp_path / "out")]
    done = forks.run(["-m", "verl", "merge", *words], timeout=120)
    assert "read back and equal" in done.stderr
    assert "%|" not in done.stderr


def test_another_model_is_told_apart(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint
    other = tiny_model_dir(tmp_path / "other", "qwen3", seed=1, tie_word_embeddings=True)
    assert run("test", folder / "actor", "--test_hf_dir", other) == 1
    assert "differs from the one in" in caplog.text or "missing" in caplog.text or "unknown" in caplog.text


def test_a_missing_shard_is_named_and_nothing_is_written(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint
    copy = tmp_path / "copy"
    shutil.copytree(folder / "actor", copy)
    (copy / "model_world_size_3_rank_1.pt").unlink()
    assert run("merge", copy, "--target_dir", str(tmp_path / "out")) == 1
    assert "model_world_size_3_rank_1.pt is missing" in caplog.text
    assert not (tmp_path / "out").exists()


def test_rows_that_no_file_holds_are_an_error_and_an_older_model_stays(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint
    copy, older = tmp_path / "copy", tmp_path / "out" / "model.safetensors"
    shutil.copytree(folder / "actor", copy)
    shutil.copy(copy / "model_world_size_3_rank_2.pt", copy / "model_world_size_3_rank_1.pt")
    older.parent.mkdir()
    older.write_text("older")
    assert run("merge", copy, "--target_dir", str(older.parent)) == 1
    assert "hold rows up to" in caplog.text
    assert older.read_text() == "older"


def test_a_config_that_does_not_belong_to_the_weights_is_told(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint
    copy, out = tmp_path / "copy", tmp_path / "out"
    assert run("merge", folder / "actor", "--target_dir", str(out)) == 0
    config = out / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"rms_norm_eps": 0.1}))
    assert run("test", folder / "actor", "--test_hf_dir", str(out)) == 1
    assert "has the weights of the checkpoint, but its logits differ by" in caplog.text
    shutil.copytree(folder / "actor", copy)
    (copy / "huggingface" / "config.json").write_text(json.dumps(fields | {"intermediate_size": 96}))
    assert run("merge", copy, "--target_dir", str(tmp_path / "other")) == 1
    assert "has shape [128, 64] in the shards, but [96, 64] according to huggingface/config.json" in caplog.text
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "as Transformers 4 kept them"])
def test_experts(tmp_path, caplog, apart):
    sizes = {"vocab_size": 104, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    actor = tmp_path / "actor"
    make_engine(str(tmp_path / "model")).save_checkpoint(str(actor))
    if apart:  # a file of Transformers has the names of version 4, which the shards of verl 0.8 have too
        weights = load_file(tmp_path / "model" / "model.safetensors")
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
        torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    assert run("merge", actor, "--target_dir", str(tmp_path / "out")) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight), name
    assert run("test", actor, "--test_hf_dir", str(tmp_path / "out")) == 0
    if apart:
        del weights["model.layers.0.mlp.experts.3.up_proj.weight"]
        torch.save(weights, actor / "model_world_size_1_rank_0.pt")
        assert run("merge", actor, "--target_dir", str(tmp_path / "fewer")) == 1
        assert "the experts cannot be joined" in caplog.text
        assert not (tmp_path / "fewer").exists()


def test_refusals(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint
    assert main(["merge", "--backend", "megatron", "--local_dir", str(folder / "actor")]) == 1
    assert "was written by fsdp: use --backend fsdp" in caplog.text
    assert run("merge", folder / "actor", "--is-value-model") == 1
    assert "not a value model" in caplog.text
    (tmp_path / "p/run").mkdir(parents=True)
    (tmp_path / "p/run/latest_checkpointed_iteration.txt").write_text("7")
    assert run("merge", tmp_path) == 1
    assert f"{tmp_path}/p/run holds no shards of a model. Name" in caplog.text  # the only run is taken
    (tmp_path / "p/two").mkdir()
    (tmp_path / "p/two/latest_checkpointed_iteration.txt").write_text("7")
    assert run("merge", tmp_path) == 1
    assert (
        f"{tmp_path} holds no shards of a model; below it are the runs {tmp_path}/p/run, {tmp_path}/p/two."
        in caplog.text
    )
    (tmp_path / "fsdp_config.json").write_text("{}")
    assert run("merge", tmp_path) == 1
    assert "config.json is missing" in caplog.text


def test_the_folder_of_a_run_or_step_leads_to_its_newest_actor(tmp_path):
    run_folder = tmp_path / "run"
    for step in (9, 40, 100):
        for role in ("actor", "critic"):
            (run_folder / f"global_step_{step}" / role).mkdir(parents=True)
            (run_folder / f"global_step_{step}" / role / "fsdp_config.json").touch()
    assert shards_below(run_folder) == run_folder / "global_step_100/actor"
    (run_folder / "latest_checkpointed_iteration.txt").write_text("40")
    assert shards_below(run_folder) == run_folder / "global_step_40/actor"
    assert shards_below(run_folder / "global_step_9") == run_folder / "global_step_9/actor"
    critic = run_folder / "global_step_9/critic"
    assert (shards_below(critic), backend_of(critic)) == (critic, "fsdp")
    (tmp_path / "sft/global_step_1").mkdir(parents=True)
    assert shards_below(tmp_path / "sft") is None
    (tmp_path / "sft/global_step_1/megatron_config.json").touch()
    assert shards_below(tmp_path / "sft") == tmp_path / "sft/global_step_1"
    assert backend_of(tmp_path / "sft/global_step_1") == "megatron"
    assert shards_below(tmp_path) is None


def test_a_target_that_is_a_file_or_the_checkpoint_is_refused_before_weights_are_read(checkpoint, tmp_path, caplog):
    actor = checkpoint[0] / "actor"
    (tmp_path / "file").write_text("")
    before = sorted(file.name for file in actor.iterdir())
    for target, wrong in ((tmp_path / "file", "is a file"), (actor / "../actor", "is the folder of --local_dir")):
        assert run("merge", actor, "--target_dir", str(target)) == 1
        assert f"--target_dir={target} {wrong}" in caplog.text
    assert sorted(file.name for file in actor.iterdir()) == before
