"""Write a small model as a GGUF file, as the converters of published ones do."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PER_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_gguf(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight``."""
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{PER_LAYER[part]}.weight"


def rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp: both halves of a head alternate."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    split: str = "gpt-2",
) -> Path:
    """Write a Llama with a byte-level tokenizer; matrices in the format ``kind``, the rest in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    state = {name: weight.detach().float() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, weight in state.items():
        if "q_proj" in name:
            weight = rotated(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = rotated(weight, config.num_key_value_heads)
        values = weight.numpy()
        as_kind = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name_in_gguf(name), gguf.quants.quantize(values, as_kind), raw_dtype=as_kind)
    backend = tokenizer.backend_tokenizer
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = set(tokenizer.all_special_tokens) | {added.content for added in tokenizer.added_tokens_decoder.values()}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
