"""Merging LoRA adapters: the folder scores as the model with adapters, what does not belong together is told."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.workers.support import LAYOUTS, WHOLE, make_engine, naive_outputs, ragged_batch
from verl.model_merger.__main__ import main
from verl.testing.models import tiny_model_dir
from verl.workers.config import CriticConfig
from verl.workers.losses import ValueLoss, sft_loss


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


def trained(path, kind="language_model", **settings):
    batch, engine = ragged_batch(), make_engine(path, kind, lora_rank=4, optimizer={"lr": 1e-2}, **settings)
    loss = sft_loss if kind == "language_model" else ValueLoss(CriticConfig(cliprange_value=50.0))
    with engine.train_mode():
        for _ in range(2):
            engine.train_batch(batch, loss, WHOLE)
    return engine


def run(command, folder, *more):
    return main([command, "--backend", "fsdp", "--local_dir", str(folder), *map(str, more)])


@pytest.fixture(scope="module")
def actor(path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "actor"
    engine = trained(path, lora={"use_rslora": True})
    engine.save_checkpoint(str(folder))
    return folder, engine


def test_the_merged_folder_scores_as_the_adapters_do(actor, tmp_path, caplog):
    folder, engine = actor
    batch = ragged_batch()
    assert run("merge", folder, "--target_dir", tmp_path) == 0
    found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_close(naive_outputs(model, batch)[0], found, atol=1e-5, rtol=0)
        with engine.disable_adapter():
            base = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        assert (found - base).abs().max() > 0.1
    assert run("test", folder, "--test_hf_dir", tmp_path) == 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    assert run("test", folder, "--test_hf_dir", tmp_path) == 1
    assert "'model.layers.0.mlp.up_proj.weight' differs from the one in" in caplog.text


def test_adapters_are_merged_in_fp32_and_the_sum_is_rounded_once(actor, path, tmp_path):
    """Rounding the adapters, or B A, to the bf16 of the model first would change most of the weights."""
    folder, _ = actor
    AutoModelForCausalLM.from_pretrained(path).bfloat16().save_pretrained(tmp_path / "bf16")
    assert run("merge", folder, "--base_model", tmp_path / "bf16", "--target_dir", tmp_path / "out") == 0
    base, found = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "out"))
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    adapters = load_file(folder / "lora_adapter" / "adapter_model.safetensors")
    layers = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in adapters}
    assert len(layers) == 14  # seven in each of two layers
    for name in layers:
        down, up = (adapters[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        assert down.dtype == torch.float32
        exact = base[f"{name}.weight"].double() + 8 * (up.double() @ down.double())  # 16 / √4
        error = (found[f"{name}.weight"].double() - exact).abs()
        # bf16 has 8 digits: half a unit in the last place is at most 2^-8 of the number.
        assert (error <= exact.abs() * 2**-8 + 1e-6).all(), name


def test_biases_of_routers_are_not_rounded(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "model", "deepseek_v3")).bfloat16()
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.arange(8) / 10
    base.get_buffer(name).data = bias
    base.save_pretrained(tmp_path / "model")
    make_engine(str(tmp_path / "model"), lora_rank=4).save_checkpoint(str(tmp_path / "actor"))
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[name], bias)
    assert found["model.norm.weight"].dtype is torch.bfloat16


def test_a_critic_is_merged_with_its_head(path, tmp_path):
    engine = trained(path, "value_model")
    engine.save_checkpoint(str(tmp_path / "critic"))
    assert run("merge", tmp_path / "critic", "--target_dir", tmp_path / "out", "--is-value-model") == 0
    ids = torch.tensor([[5, 9, 30, 77]])
    batch = ragged_batch()
    again = make_engine(str(tmp_path / "out"), "value_model", trained=False)
    expected = engine.infer_batch(batch, {"values"}, LAYOUTS["three"])["values"]
    assert_close(again.infer_batch(batch, {"values"}, WHOLE)["values"], expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert AutoModelForTokenClassification.from_pretrained(tmp_path / "out")(ids).logits.abs().max() > 1e-3


def test_shards_of_verl_0_8_are_merged(actor, tmp_path, caplog):
    """They have the whole model under peft's names; the scale of rank 4 here is 16 / √4 = 8 = 32 / 4."""
    folder, engine = actor
    weights = {f"base_model.model.{name}": p.detach() for name, p in engine.model.named_parameters()}
    shutil.copytree(folder, tmp_path / "actor")
    torch.save(weights, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "out") == 1
    assert "lora_train_meta.json, which verl 0.8 writes with r and lora_alpha, cannot be read" in caplog.text
    (tmp_path / "actor" / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 32}))
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "out") == 0
    assert run("test", folder, "--test_hf_dir", tmp_path / "out") == 0


def test_what_does_not_belong_together_is_told(actor, tmp_path, caplog):
    folder, _ = actor
    assert run("merge", folder, "--target_dir", tmp_path / "out", "--base_model", tmp_path / "gone") == 1
    assert "gone' does not exist" in caplog.text
    assert "name its folder with --base_model" in caplog.text
    base = json.loads((folder / "lora_adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    for more in ((), ("--base_model", base)):
        assert run("merge", folder, "--target_dir", base, *more) == 1
        assert f"--target_dir={base} is the folder of the model of the adapters" in caplog.text
        caplog.clear()
    other = tiny_model_dir(tmp_path / "other", "qwen3", intermediate_size=96, tie_word_embeddings=True)
    assert run("merge", folder, "--target_dir", tmp_path / "out", "--base_model", other) == 1
    assert "of other shapes" in caplog.text
    shutil.copytree(folder, tmp_path / "actor")
    shutil.rmtree(tmp_path / "actor" / "lora_adapter")
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "out") == 1
    assert "does not say of which model" in caplog.text
    assert not (tmp_path / "out").exists()
