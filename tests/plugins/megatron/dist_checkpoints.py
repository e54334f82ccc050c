"""Checkpoints that megatron-core itself writes and reads: its own GPTModel, with the weights of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from verl.workers.engine import BaseEngine

# Parts of names of an engine's parameters: those that megatron-core's own layers have.
LATENT = {
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "router.e_score_correction_bias": "router.expert_bias",
}


def core_model(engine: BaseEngine, vocab: int | None = None) -> Any:
    """A GPTModel of megatron-core, of its own layers, with the weights of ``engine`` on one pipeline stage.

    ``vocab`` is the number of rows of the embedding; by default as many as the engine has.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp

    from verl.plugins.megatron import cpu

    ours, hf = engine.model.pieces[0], engine.model.text_config  # type: ignore[attr-defined]
    settings = {
        name: getattr(ours.config, name)
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "normalization", "qk_layernorm", "add_qkv_bias", "add_bias_linear", "gated_linear_unit"),
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "params_dtype"),
            *("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        )
    }
    config_class = TransformerConfig
    if getattr(hf, "kv_lora_rank", None) is not None:
        config_class = MLATransformerConfig
        settings |= {name: getattr(hf, name) for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
        settings |= {"qk_head_dim": hf.qk_nope_head_dim, "qk_pos_emb_head_dim": hf.qk_rope_head_dim}
        settings["qk_layernorm"] = True
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        settings["moe_layer_freq"] = [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)]
    cpu.install()
    multi_latent_attention.TELinear = ()  # None without TransformerEngine, and it asks for objects of it
    config = config_class(
        **settings,
        activation_func=functional.silu,
        use_cpu_initialization=True,
        moe_token_dispatcher_type="alltoall",
    )
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in layers.layer_specs:  # it has no weights, and megatron-core's on CPUs takes no latent attention
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    embedding = ours.embedding.word_embeddings
    model = GPTModel(
        config,
        layers,
        vocab_size=vocab or embedding.num_embeddings,
        max_sequence_length=64,
        share_embeddings_and_output_weights=ours.share_embeddings_and_output_weights,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        targets = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, parameter in ours.named_parameters():
            for own, core in LATENT.items():
                name = name.replace(f".{own}", f".{core}")
            targets[name][: len(parameter)].copy_(parameter)
    return model


def save_as_core(engine: BaseEngine, folder: Path, metadata: dict | None = None, prefix: str = "", **more: Any) -> None:
    """Write the weights of ``engine`` by megatron-core; ``metadata`` are its options of form. Collective."""
    model = core_model(engine, **more)
    folder.mkdir(parents=True, exist_ok=True)
    _core().save(model.sharded_state_dict(prefix=prefix, metadata=metadata), str(folder), ("torch_dist", 1))


def load_as_core(engine: BaseEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint by megatron-core into a model like that of ``engine``; return its tensors."""
    model = core_model(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    core = _core()
    state = core.load(model.sharded_state_dict(), str(folder), strict=core.validation.StrictHandling.RAISE_UNEXPECTED)
    model.load_state_dict(state)
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _core() -> Any:
    """megatron-core's module of checkpoints, on CPUs."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver, torch  # noqa: F401

    from verl.plugins.megatron import cpu

    cpu.install()
    return dist_checkpointing
