"""DeepSeek-V3 and GLM-4.5 under strategy=megatron: latent attention, groups of experts, shared experts."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

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
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.workers.losses import PolicyLoss

pytest.importorskip("verl.plugins.megatron.library")

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
MODELS = {
    "deepseek": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    # Queries without a latent vector, and rotated halves instead of neighbours.
    "plain": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "routed_scaling_factor": 1.5}),
}
GLM = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "use_qk_norm": True,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "dtype": "float32",
}
EXPERTS = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CASES = {
    "experts": ("deepseek", EXPERTS, "three"),
    "tensor, padded": ("plain", TP | {"use_remove_padding": False}, "whole"),
    "pipeline": ("deepseek", {"pipeline_model_parallel_size": 2, "enable_gradient_checkpointing": True}, "by tokens"),
    "context": ("plain", {"context_parallel_size": 2}, "whole"),
    "experts of glm": ("glm", EXPERTS, "whole"),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def on_two_ranks(rank, world_size, folder):
    result = {}
    for case, (name, settings, layout) in CASES.items():
        batch = torch.load(folder / f"{name}.pt", weights_only=False)
        engine = megatron_engine(str(folder / name), **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.eval_mode():
            outputs = engine.infer_batch(mine, {"log_probs", "entropy"}, LAYOUTS[layout])
        with engine.train_mode():
            norm = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])["grad_norm"]
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        if case == "experts":
            engine.save_checkpoint(str(folder / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
        result[case] = outputs if engine.is_mp_src_rank_with_outputs() else None, norm, weights_of(engine)
    # In a model of bf16 the bias stays fp32, and a checkpoint of another layout has it.
    half = megatron_engine(str(folder / "deepseek"), dtype="bfloat16", pipeline_model_parallel_size=2)
    half.load_checkpoint(str(folder / "saved"))
    result["bias"] = dict(half.get_per_tensor_param())[BIAS]
    torch.save(result, folder / f"rank_{rank}.pt")


def test_two_ranks_make_the_steps_of_plain_pytorch(tmp_path):
    expected, biases = {}, {}
    for name, (family, entries) in MODELS.items():
        tiny_model_dir(tmp_path / name, family, **entries)
    torch.manual_seed(0)
    Glm4MoeForCausalLM(Glm4MoeConfig(**GLM)).save_pretrained(tmp_path / "glm")
    for name in (*MODELS, "glm"):
        path = str(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(path)
        # Large enough to change the choice of many tokens.
        biases[name] = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 0.2
        model.get_buffer(BIAS).copy_(biases[name])
        model.save_pretrained(path)
        with torch.no_grad():
            outputs = naive_outputs(model, plain := ragged_batch())
        batch = with_log_probs(plain, outputs[0])
        torch.save(batch, tmp_path / f"{name}.pt")
        expected[name] = outputs, *naive_update(path, batch, CONFIG)
    run_ranks(on_two_ranks, 2, tmp_path)
    for rank in range(2):
        result = torch.load(tmp_path / f"rank_{rank}.pt")
        assert torch.equal(result.pop("bias"), biases["deepseek"])
        for case, (computed, own_norm, own) in result.items():
            name = CASES[case][0]
            outputs, weights, norm = expected[name]
            if computed is not None:
                for column, values in zip(("log_probs", "entropy"), outputs, strict=True):
                    assert_close(computed[column], values, atol=1e-5, rtol=0, msg=lambda t, c=case: f"{c}: {t}")
            assert own_norm == pytest.approx(norm, rel=1e-5), case
            assert torch.equal(own.pop(BIAS), biases[name])
            assert own.keys() == weights.keys()
            for key, weight in weights.items():
                assert_close(own[key], weight, atol=1e-5, rtol=0, msg=lambda t, k=key, c=case: f"{c} {k}: {t}")
    merge(tmp_path / "saved", tmp_path / "merged")
    for folder in (tmp_path / "merged", tmp_path / "saved" / "huggingface"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor(BIAS), biases["deepseek"])
