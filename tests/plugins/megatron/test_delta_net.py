"""Qwen3-Next and Qwen3.5 under strategy=megatron: gated delta nets, gated attention, gated shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import CONFIG, TP, megatron_engine
from tests.workers.support import (
    LAYOUTS,
    naive_outputs,
    naive_update,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
    with_log_probs,
)
from verl.errors import ConfigError
from verl.model_merger import merge
from verl.testing.models import tiny_tokenizer
from verl.workers.losses import PolicyLoss

pytest.importorskip("verl.plugins.megatron.library")

SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MODELS: dict[str, tuple[str, Mapping[str, object]]] = {
    "next": ("Qwen3Next", EXPERTS | {"mlp_only_layers": [2]}),
    "dense": ("Qwen3_5Text", {"tie_word_embeddings": True}),
    "mixed": ("Qwen3_5MoeText", EXPERTS),
}
OVER_EXPERTS: dict[str, Any] = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "one stage, experts": ("next", OVER_EXPERTS, "three"),
    "tensor, padded": ("dense", TP | {"use_remove_padding": False, "sequence_parallel": False}, "whole"),
    "pipeline": ("next", {"pipeline_model_parallel_size": 2, "enable_gradient_checkpointing": True}, "by tokens"),
}
MORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "copies": ("mixed", {}, "whole"),
    "experts by columns, padded": ("mixed", TP | {"use_remove_padding": False}, "three"),
}


def model_dir(path, name: str) -> str:
    family, entries = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **entries)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        if key.endswith(("norm.weight", "dt_bias")):  # else all are alike
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def on_two_ranks(rank, world_size, folder, cases):
    result = {}
    for case, (name, settings, layout) in cases.items():
        batch = torch.load(folder / f"{name}.pt", weights_only=False)
        engine = megatron_engine(str(folder / name), **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.eval_mode():
            outputs = engine.infer_batch(mine, {"log_probs", "entropy"}, LAYOUTS[layout])
        with engine.train_mode():
            norm = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])["grad_norm"]
            if case == "pipeline":
                engine.save_checkpoint(str(folder / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        is_whole = engine.get_data_parallel_size() == 1 and engine.is_mp_src_rank_with_outputs()
        result[case] = outputs if is_whole else None, norm, weights_of(engine)
    if "pipeline" in cases:  # another layout goes on from its checkpoint
        engine = megatron_engine(str(folder / "next"), **OVER_EXPERTS)
        engine.load_checkpoint(str(folder / "saved"))
        with engine.train_mode():
            engine.train_batch(torch.load(folder / "next.pt", weights_only=False), PolicyLoss(CONFIG), LAYOUTS["whole"])
        result["pipeline, resumed"] = *result["pipeline"][:2], weights_of(engine)
    torch.save(result, folder / f"rank_{rank}.pt")


def compare(tmp_path, cases):
    expected = {}
    for name in {name for name, *_ in cases.values()}:
        path = model_dir(tmp_path / name, name)
        with torch.no_grad():
            outputs = naive_outputs(AutoModelForCausalLM.from_pretrained(path), plain := ragged_batch())
        batch = with_log_probs(plain, outputs[0])
        torch.save(batch, tmp_path / f"{name}.pt")
        expected[name] = outputs, *naive_update(path, batch, CONFIG)
    run_ranks(on_two_ranks, 2, tmp_path, cases)
    for rank in range(2):
        for case, (computed, own_norm, own) in torch.load(tmp_path / f"rank_{rank}.pt").items():
            outputs, weights, norm = expected[cases[case.removesuffix(", resumed")][0]]
            if computed is not None:
                for column, values in zip(("log_probs", "entropy"), outputs, strict=True):
                    assert_close(computed[column], values, atol=1e-5, rtol=0, msg=lambda t, c=case: f"{c}: {t}")
            assert own_norm == pytest.approx(norm, rel=1e-5), case
            assert own.keys() == weights.keys()
            for key, weight in weights.items():
                assert_close(own[key], weight, atol=1e-5, rtol=0, msg=lambda t, k=key, c=case: f"{c} {k}: {t}")


def test_two_ranks_make_the_steps_of_plain_pytorch(tmp_path):
    compare(tmp_path, CASES)
    merge(tmp_path / "saved", tmp_path / "merged")
    merged, exported = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "merged", tmp_path / "saved" / "huggingface")
    )
    assert all(torch.equal(merged[key], weight) for key, weight in exported.items())


@pytest.mark.slow
def test_two_ranks_make_the_steps_of_a_mixture(tmp_path):
    compare(tmp_path, MORE)


def test_adapters_are_refused_before_weights_are_read(tmp_path):
    path = model_dir(tmp_path, "next")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no adapters of gated attention and gated delta nets"):
        megatron_engine(path, lora_rank=4)
