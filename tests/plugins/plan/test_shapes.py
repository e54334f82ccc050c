"""Parameters counted from config.json alone, against published models and those that Transformers builds."""

import json

import pytest
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.support.gguf_files import write_gguf
from verl.errors import ConfigError
from verl.plugins.plan.shapes import ModelShape, config_file
from verl.testing.models import tiny_model, tiny_tokenizer

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_600M = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(("fields", "count"), [(QWEN_7B, 7_615_616_512), (LLAMA_8B, 8_030_261_248)])
def test_published_counts(fields, count):
    assert ModelShape.from_fields(fields, "config.json").parameters() == count


@pytest.mark.parametrize("family", ["gemma", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_transformers(family, tied):
    model = tiny_model(family, num_hidden_layers=3, tie_word_embeddings=tied)
    fields = json.loads(model.config.to_json_string(use_diff=False))
    assert ModelShape.from_fields(fields, "config.json").parameters() == sum(p.numel() for p in model.parameters())


def test_counts_of_experts_in_some_layers_are_those_of_transformers():
    model = tiny_model("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    fields = json.loads(model.config.to_json_string(use_diff=False))
    shape = ModelShape.from_fields(fields, "config.json")
    # Of the checkpoint's tensors those of the experts, which Transformers joins in two, are three for each expert.
    assert shape.sparse_layers == (1,)
    assert shape.tensors == sum(1 for _ in model.state_dict()) - 2 + 3 * fields["num_local_experts"]
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert [sum(shape.parameters_of_layers(layer, layer + 1)) for layer in range(4)] == of_layers
    assert shape.largest_layer_parameters == of_layers[1] == max(of_layers)
    assert shape.parameters() == sum(p.numel() for p in model.parameters())


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"num_hidden_layers": 4}),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
        ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    ],
)
def test_counts_of_shared_experts_are_those_of_transformers(family, changes):
    if family == "glm4_moe":
        config = Glm4MoeConfig(
            hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, n_routed_experts=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100, **changes,
        )  # fmt: skip
        model = Glm4MoeForCausalLM(config)
    else:
        model = tiny_model(family, **changes)
    shape = ModelShape.from_fields(json.loads(model.config.to_json_string(use_diff=False)), "config.json")
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    parts = [shape.parameters_of_layers(0, 1), shape.parameters_of_layers(1, shape.layers)]
    assert sum(parts[0] + parts[1]) == sum(shape.parameters_of_layers(0, shape.layers))
    assert parts[0][1] == 0  # the first layer has no experts


def test_latent_attention_as_published():
    # 671 billion parameters (arXiv:2412.19437); 70 KB of latent vectors for each token, 576 numbers in 61 layers, on
    # every rank (arXiv:2505.09343, table 1).
    shape = ModelShape.from_fields(DEEPSEEK_V3, "config.json")
    assert shape.parameters() == pytest.approx(671e9, rel=1e-3)
    assert shape.cached_bytes(2) == shape.cached_bytes(2, ranks=8) == 576 * 61 * 2 == 70_272
    # Transformers caches keys of 192 and values of 128 numbers for each of 128 heads.
    assert shape.cached_bytes(2, ranks=8, per_head=True) == 61 * 128 * 320 * 2 / 8


def test_experts_and_value_heads_by_hand():
    # One layer, hidden 4, 2 heads of 2, 1 key head: q 4·4, k and v 2·(4·2), o 4·4 = 48; norms 2·4, head norms 2·2.
    # 3 experts of width 5: 3·3·(4·5) = 180, router 3·4 = 12. Embedding and head 2·(7·4) = 56, last norm 4.
    fields = {
        "model_type": "qwen3_moe", "hidden_size": 4, "intermediate_size": 9, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 7, "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 5, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = ModelShape.from_fields(fields, "config.json")
    assert shape.parameters() == 48 + 12 + 180 + 12 + 56 + 4
    # A value head has 4 weights and a bias in place of the 28 weights of the other head.
    assert shape.parameters(outputs=1) == shape.parameters() - 28 + 5
    assert shape.cached_bytes(2) == 2 * 1 * 2 * 2
    # LoRA of rank 2: on q_proj 2·(4 + 4), on v_proj 2·(4 + 2).
    assert shape.adapter_parameters(2, ("q_proj", "v_proj")) == 16 + 12
    # On all linear layers, which are those of attention: on k_proj and o_proj 2·(4 + 2) and 2·(4 + 4) more.
    assert shape.adapter_parameters(2) == 16 + 12 + 12 + 16
    # On each of 3 experts 2·(4 + 2·5) and 2·(5 + 4).
    assert shape.adapter_parameters(2, ("q_proj",), ("gate_up_proj", "down_proj")) == 16 + 3 * (28 + 18)


def test_refused_are_other_models_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="model_type=mamba is not planned for"):
        ModelShape.from_fields({"model_type": "mamba"}, "config.json")
    with pytest.raises(ConfigError, match="vocab_size must be"):
        ModelShape.from_fields({key: value for key, value in QWEN_7B.items() if key != "vocab_size"}, "config.json")
    latent = QWEN_7B | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": "8"}
    with pytest.raises(ConfigError, match="qk_rope_head_dim, qk_nope_head_dim, v_head_dim, n_routed_experts must be"):
        ModelShape.from_fields(latent, "config.json")
    with pytest.raises(ConfigError, match="mlp_only_layers=3 must be a list"):
        ModelShape.from_fields(QWEN_7B | {"mlp_only_layers": 3}, "config.json")
    with pytest.raises(ConfigError, match="num_hidden_layers must be"):
        ModelShape.from_fields(QWEN_7B | {"num_hidden_layers": 0}, "config.json")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ModelShape.read(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        ModelShape.read(str(tmp_path / "none"))


def test_sizes_of_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = write_gguf(tiny_model("llama", vocab=384), tiny_tokenizer("bpe"), tmp_path / "tiny.gguf")
    assert json.loads(config_file(str(file)).read_text())["hidden_size"] == 64
