"""A model folder as a checkpoint that megatron-core reads, and back."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.dist_checkpoints import core_model, load_as_core, save_as_core
from tests.plugins.megatron.support import megatron_engine
from tests.support.tiny_run import same
from tests.workers.support import weights_of
from verl.model_merger.__main__ import main
from verl.testing.models import tiny_model_dir

pytest.importorskip("verl.plugins.megatron.library")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_megatron_core_reads_what_is_written(tmp_path, family):
    model = tiny_model_dir(tmp_path / "model", family, **({"tie_word_embeddings": True} if family == "qwen2" else {}))
    dist, back = tmp_path / "dist", tmp_path / "back"
    assert main([model, "--to", "torch-dist", "--target_dir", str(dist)]) == 0
    engine = megatron_engine(model, trained=False)
    expected = {n: t for n, t in core_model(engine).state_dict().items() if isinstance(t, torch.Tensor)}
    assert same(load_as_core(engine, dist), expected)
    settings = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(dist)}
    assert same(weights_of(megatron_engine(model, trained=False, **settings)), weights_of(engine))
    assert main([str(dist), "--base_model", model, "--target_dir", str(back)]) == 0
    assert main(["test", str(dist), "--base_model", model, "--test_hf_dir", model]) == 0
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, back)]
    assert same(*map(dict, models))


def test_folders_of_verls_own_megatron_runs_are_merged(tmp_path, caplog):
    """actor/dist_ckpt is written by megatron-core, and actor/huggingface has config and tokenizer."""
    model = tiny_model_dir(tmp_path / "model", "qwen3")
    actor = tmp_path / "run" / "global_step_3" / "actor"
    save_as_core(megatron_engine(model, trained=False), actor / "dist_ckpt", prefix="module.")
    shutil.copytree(model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    arguments = [str(actor.parent.parent), "--target_dir", str(tmp_path / "merged")]
    assert main([*arguments, "--backend", "megatron"]) == 0
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, tmp_path / "merged")]
    assert same(*map(dict, models))
    assert main([*arguments, "--backend", "fsdp"]) == 1
    assert "was written by megatron" in caplog.text
    assert main([str(actor / "dist_ckpt"), "--target_dir", str(tmp_path / "other")]) == 1
    assert "without config.json. Name a folder that has config.json" in caplog.text


def test_what_is_not_written(tmp_path, caplog):
    model = tiny_model_dir(tmp_path / "model", "qwen3")
    to = ["--to", "torch-dist", "--target_dir"]
    assert main([model, *to, model]) == 1
    assert "is there already" in caplog.text
    assert main([str(tmp_path), *to, str(tmp_path / "dist")]) == 1
    assert "is no model folder: it has no config.json. Make one of a checkpoint first: verl merge" in caplog.text
    assert main([tiny_model_dir(tmp_path / "gemma", "gemma2"), *to, str(tmp_path / "dist")]) == 1
    assert "pre_feedforward_layernorm.weight has no name in megatron-core's GPTModel" in caplog.text
    assert not (tmp_path / "dist").exists()
