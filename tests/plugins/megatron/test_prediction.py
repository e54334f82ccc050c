"""Multi-token prediction under strategy=megatron: the heads' loss, their training, and what is written of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.heads import add_heads, naive_update_with_heads
from tests.plugins.megatron.support import CONFIG, TP, megatron_engine
from tests.workers.support import (
    LAYOUTS,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
    with_log_probs,
)
from verl.errors import ConfigError
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.workers.losses import PolicyLoss

pytest.importorskip("verl.plugins.megatron.library")

HEADS, FACTOR = 2, 0.3
EXPERTS = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
# Settings, micro-batches, and whether the model gets no gradient of the heads.
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "experts": (EXPERTS, "three", False),
    "pipeline": (PP | {"override_transformer_config": {"pipeline_model_parallel_layout": "Et|tmmL"}}, "whole", False),
    "detached, padded": (PP | {"use_remove_padding": False}, "by tokens", True),
    "context": ({"context_parallel_size": 2}, "by tokens", False),
    "data": ({"enable_gradient_checkpointing": False}, "one by one", False),
}


def mtp(is_detached: bool = False) -> dict[str, Any]:
    keys = {"enable": True, "enable_train": True, "detach_encoder": is_detached, "mtp_loss_scaling_factor": FACTOR}
    return {"mtp": keys | {"enable_rollout": True}}


def folder_with_heads(path: Path, count: int = HEADS) -> str:
    folder = tiny_model_dir(path, "deepseek_v3", num_nextn_predict_layers=count)
    add_heads(folder, count)
    return folder


def on_two_ranks(rank, world_size, folder):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    result = {}
    for case, (settings, layout, is_detached) in CASES.items():
        engine = megatron_engine(str(folder / "model"), **mtp(is_detached), **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        if case == "experts":
            first = weights_of(engine)
            if rank == 0:
                torch.save(first, folder / "first.pt")
            sent = {name for name, _ in engine.weights_for_rollout(torch.float32)}
            assert {f"model.layers.{head}.eh_proj.weight" for head in (2, 3)} <= sent
            assert sum("embed_tokens" in name for name in sent) == 1  # heads have the model's
        with engine.train_mode():
            metrics = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        if case == "experts":
            engine.save_checkpoint(str(folder / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
        result[case] = metrics, weights_of(engine)
    # Another layout goes on from the checkpoint as the one that wrote it.
    resumed = megatron_engine(str(folder / "model"), **mtp(), **PP)
    resumed.load_checkpoint(str(folder / "saved"))
    result["resumed"] = weights_of(resumed)
    torch.save(result, folder / f"rank_{rank}.pt")


def test_heads_on_two_ranks_make_the_steps_of_plain_pytorch(tmp_path):
    path = folder_with_heads(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        batch = with_log_probs(plain := ragged_batch(), naive_outputs(model, plain)[0])
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(on_two_ranks, 2, tmp_path)
    first = torch.load(tmp_path / "first.pt")
    expected = {
        is_detached: naive_update_with_heads(path, first, batch, CONFIG, HEADS, FACTOR, is_detached)
        for is_detached in (True, False)
    }
    results = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    for result in results:
        resumed = result.pop("resumed")
        assert all(torch.equal(resumed[name], weight) for name, weight in results[0]["experts"][1].items())
        for case, (metrics, weights) in result.items():
            updated, norm, losses = expected[CASES[case][2]]
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), case
            assert [metrics["mtp/loss_1"], metrics["mtp/loss_2"]] == pytest.approx(losses, rel=1e-5), case
            assert metrics["mtp/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5), case
            for name, weight in updated.items():
                assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")
    # The exported folder and the merged one have the heads, and what they share with the model, as it is now.
    merge(tmp_path / "saved", tmp_path / "merged")
    weights, original = results[0]["experts"][1], load_file(tmp_path / "model" / "model.safetensors")
    for folder in (tmp_path / "merged", tmp_path / "saved" / "huggingface"):
        stored = load_file(folder / "model.safetensors")
        assert stored.keys() == original.keys()
        assert torch.equal(stored["model.layers.3.eh_proj.weight"], weights["model.layers.3.eh_proj.weight"])
        assert torch.equal(stored["model.layers.3.embed_tokens.weight"], weights["model.embed_tokens.weight"])
        assert torch.equal(stored["model.layers.2.shared_head.head.weight"], weights["lm_head.weight"])
        assert not torch.equal(stored["model.layers.2.hnorm.weight"], original["model.layers.2.hnorm.weight"])


@pytest.mark.parametrize("make", [make_engine, megatron_engine], ids=["fsdp", "megatron"])
def test_heads_that_are_not_trained_are_in_exported_folders_as_they_were(tmp_path, make, caplog):
    path = folder_with_heads(tmp_path / "model", 1)
    engine = make(path)
    engine.save_checkpoint(str(tmp_path / "saved"), 1, ("model", "hf_model"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    heads = {name for name in original if name.startswith("model.layers.2.")}
    merge(tmp_path / "saved", tmp_path / "merged", base_model=path)
    for folder in (tmp_path / "saved" / "huggingface", tmp_path / "merged"):
        stored = load_file(folder / "model.safetensors")
        assert stored.keys() == original.keys()
        assert all(torch.equal(stored[name], original[name]) for name in heads)
    assert "lacks them" not in caplog.text
    merge(tmp_path / "saved", tmp_path / "without")
    assert "1 head(s) of multi-token prediction, and the shards have none" in caplog.text


def test_what_heads_need_is_told(tmp_path):
    path = tiny_model_dir(tmp_path / "saved_by_transformers", "deepseek_v3", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"do not contain model.layers.2.eh_proj.weight: .*Take the original folder"):
        megatron_engine(path, **mtp())
    plain = tiny_model_dir(tmp_path / "plain", "qwen3")
    with pytest.raises(ConfigError, match=r"has no heads: its config\.json has no num_nextn_predict_layers above 0"):
        megatron_engine(plain, **mtp())
    with pytest.raises(ConfigError, match="LoRA adapters are trained in place"):
        megatron_engine(folder_with_heads(tmp_path / "heads"), lora_rank=2, **mtp())
