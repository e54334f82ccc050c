"""Sizes of experts read from configs, against the modules that Transformers builds."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl.utils.flops_counter import FlopsCounter
from verl.utils.model_facts.experts import ExpertSizes
from verl.workers.routers import routers_of

COMMON = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
COMMON |= {"intermediate_size": 12, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 4}
CONFIGS = {
    "every second layer but the last": Qwen3MoeConfig(
        **COMMON, num_experts=6, moe_intermediate_size=10, decoder_sparse_step=2, mlp_only_layers=[3], head_dim=4
    ),
    "all layers": MixtralConfig(**COMMON, num_local_experts=4),
    "a shared expert": Qwen2MoeConfig(
        **COMMON, num_experts=4, moe_intermediate_size=10, shared_expert_intermediate_size=14
    ),
    "the first layer dense": DeepseekV3Config(
        **COMMON, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, moe_intermediate_size=10, n_shared_experts=2,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_modules(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    found = ExpertSizes.from_config(model.config)
    routers = [routers_of(layer) for layer in model.model.layers]
    assert found.sparse == tuple(map(bool, routers))
    layer = next(layer for layer, own in zip(model.model.layers, routers, strict=True) if own)
    [router] = routers_of(layer)
    assert router.weight.shape == (found.count, COMMON["hidden_size"])
    assert layer.mlp.experts.down_proj.shape == (found.count, COMMON["hidden_size"], found.width)
    shared = [p for part, p in layer.named_parameters() if "shared_expert" in part and "down_proj" in part]
    assert [weight.shape[1] for weight in shared] == ([found.shared_width] if found.shared_width else [])
    assert found.per_token == 2


def test_a_dense_model_has_none():
    assert ExpertSizes.from_config(Qwen3Config(num_hidden_layers=2)) is None
    dense = Qwen3MoeConfig(**COMMON, num_experts=6, moe_intermediate_size=10, mlp_only_layers=[0, 1, 2, 3])
    assert ExpertSizes.from_config(dense) is None


def test_products_of_layers_with_and_without_experts_by_hand():
    # Attention 4·8·8 = 256 in each of four layers. A dense layer has 3·8·12 = 288 weights; the one with experts a
    # router of 6·8 = 48, and a token meets two experts, 2·3·8·10 = 480.
    assert FlopsCounter(CONFIGS["every second layer but the last"]).weights == 4 * 256 + 3 * 288 + (48 + 480)
