"""Architectures beyond the plain decoder: packed where that is right, padded where not, refused where neither is."""

import logging

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.support import LAYOUTS, WHOLE, make_engine, naive_outputs, ragged_batch
from verl.errors import ConfigError
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.engine.model.headed import HeadedModel, check_sequence_sharing
from verl.workers.losses import sft_loss

SMALL = {
    "vocab_size": 104, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

PACKED = {
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 4},
    "Qwen3Moe": MOE,
    "Phi3": {},
}
PADDED = {
    "Lfm2": ({"layer_types": ["conv", "full_attention"], "block_ff_dim": 128}, "has layers (conv) for which a row is"),
    "MiniMax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 8},
        "has layers (linear_attention) for which a row is one sequence",
    ),
    "GptOss": ({"num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1}, "it needs s_aux"),
    "Qwen2Moe": (
        MOE
        | {
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "past a window that attention is not told of",
    ),
    "Qwen3Next": (
        MOE
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "has layers (linear_attention) for which a row is one sequence",
    ),
    # Each token attends to 3 tokens that an index chooses; if it is padded before its prompt, the index counts padding.
    "GlmMoeDsa": (
        {
            "num_key_value_heads": 4,
            "index_topk": 3,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
        "has layers (indexed_attention) for which a row is one sequence",
    ),
}


def model_dir(path, name, settings, std=0.15):
    config = getattr(transformers, f"{name}Config")(**SMALL | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def check(path, engine, layout):
    batch = ragged_batch()
    with torch.no_grad():
        expected, _ = naive_outputs(AutoModelForCausalLM.from_pretrained(path).eval(), batch)
    found = engine.infer_batch(batch, {"log_probs"}, layout)["log_probs"]
    assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", PACKED)
def test_packed_trained_exported_and_merged(name, tmp_path):
    path = model_dir(tmp_path / "model", name, PACKED[name])
    engine = make_engine(path)
    assert engine.is_packed
    check(path, engine, LAYOUTS["three"])
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, WHOLE)
    engine.save_checkpoint(str(tmp_path / "actor"), contents=("model", "hf_model"))
    check(tmp_path / "actor" / "huggingface", engine, WHOLE)
    merge(tmp_path / "actor", tmp_path / "merged")
    check(tmp_path / "merged", engine, WHOLE)


@pytest.mark.parametrize("name", PADDED)
def test_padded_with_the_reason(name, tmp_path, caplog):
    settings, reason = PADDED[name]
    # With small weights a leak between sequences would be as small as rounding in what the engine compares.
    path = model_dir(tmp_path, name, settings, std=0.02 if "layers" in reason else 0.15)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(path, trained=False)
    assert not engine.is_packed
    assert reason in caplog.text
    check(path, engine, LAYOUTS["three"])


def test_an_unknown_treatment_of_logits_is_refused(tmp_path):
    # Llama does not read this field, so the engine would cap logits that the model does not
    path = tiny_model_dir(tmp_path, "llama", final_logit_softcapping=1.0)
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM changes its logits in a way that this engine does not know"
    ):
        make_engine(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp32"])
def test_rounding_is_no_reason_against_packing(tmp_path, dtype):
    """Two passes show it, the model's own and one in which all is as in training: under FSDP each gathers the model."""
    path, passes = tiny_model_dir(tmp_path, "qwen3"), []

    def count(module, *_):
        passes.extend([module] * isinstance(module, HeadedModel))

    with register_module_forward_hook(count):
        assert make_engine(path, dtype=dtype, model_dtype=dtype).is_packed
        assert make_engine(path, "value_model", dtype=dtype).is_packed
    assert len(passes) == 4


def test_sequences_of_recurrent_layers_are_not_shared_by_ranks():
    config = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=2: the model has layers \(conv\)"):
        check_sequence_sharing(config, 2)
