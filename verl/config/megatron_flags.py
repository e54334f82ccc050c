"""The entries of `override_transformer_config`: fields of megatron-core 0.16's model config, and what becomes of each.

Fields that change speed, memory or rounding alone are passed on (:data:`PASSED`). Fields of parts that are replaced
here (:data:`IDLE`) are logged and dropped. Fields that change the model, and names that nobody knows, are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from verl.config.problems import Problem

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
"""Fields that say which activations are computed again."""

PIPELINE_LAYOUT = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields that say which layers a pipeline stage has (:mod:`verl.config.pipeline_layout`)."""

_BOOL, _COUNT = (True, False), "a whole number from 1"
PASSED: Mapping[str, tuple[object, ...] | str] = {
    "bias_activation_fusion": _BOOL,
    "bias_dropout_fusion": _BOOL,
    "deallocate_pipeline_outputs": _BOOL,
    "gradient_accumulation_fusion": _BOOL,
    "microbatch_group_size_per_vp_stage": _COUNT,
    "moe_deepep_num_sms": _COUNT,
    "moe_enable_deepep": _BOOL,
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "moe_hybridep_num_sms": _COUNT,
    "moe_permute_fusion": _BOOL,
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_token_dispatcher_type": ("alltoall", "flex"),
    "overlap_p2p_comm_warmup_flush": _BOOL,
}
"""Fields of speed, memory or rounding, with their values; null leaves each alone."""

ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Fields that are weights of losses of the routers of a policy, computed over the whole mini-batch."""
_BALANCING = "moe_router_load_balancing_type"
_BIAS, _BIAS_RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
ROUTERS = (*ROUTER_LOSSES, _BALANCING, _BIAS, _BIAS_RATE)
"""Fields that say how routers are trained, which is computed here."""
_USUAL_BIAS_RATE = 1e-3


def bias_update_rate(override: Mapping[str, object]) -> float:
    """Return by how much each update changes the bias of an expert; 0 leaves it as it is in the model's folder."""
    usual = _USUAL_BIAS_RATE if override.get(_BIAS) else 0.0
    rate = override.get(_BIAS_RATE)
    if override.get(_BIAS) is False:
        return 0.0
    return float(rate) if isinstance(rate, int | float) else usual


def router_loss_weight(override: Mapping[str, object], name: str) -> float:
    """Return the weight of one of :data:`ROUTER_LOSSES`, 0 where it is not set."""
    value = override.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


_ATTENTION = "attention is PyTorch's, or flash-attn's over packed rows"
_HEAD = "log-probs are computed from hidden states in slices"
_SCHEDULE = "whether the pipeline is interleaved decides how stages send"
_TE_LAYERS = "linear layers are megatron-core's own, not those of TransformerEngine"
_OTHER_LIBRARY = "a flag of another library, whose kernels are not used"
_OVERLAP = "a layer is computed as a whole"
IDLE: Mapping[str, str] = {
    **dict.fromkeys(
        ("attention_backend", "masked_softmax_fusion", "cp_comm_type", "log_max_attention_logit"), _ATTENTION
    ),
    "apply_rope_fusion": "rotary angles follow each token's position, which the fused kernel does not take",
    "fused_single_qkv_rope": "rotary angles follow each token's position, which the fused kernel does not take",
    **dict.fromkeys(("persist_layer_norm", "memory_efficient_layer_norm"), "the norm is computed here, in fp32"),
    **dict.fromkeys(("moe_grouped_gemm", "moe_use_legacy_grouped_gemm"), "experts are computed one after another"),
    "moe_router_fusion": "the router is that of Transformers",
    "moe_per_layer_logging": "the load of experts is always logged",
    **dict.fromkeys(
        ("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release"),
        _OVERLAP,
    ),
    **dict.fromkeys(
        (
            *("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag"),
            *("tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag"),
            *("tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1"),
            *("tp_comm_bootstrap_backend", "delay_wgrad_compute", "disable_parameter_transpose_cache"),
            *("use_te_rng_tracker", "use_te_activation_func", "symmetric_ar_type", "transformer_impl"),
        ),
        _TE_LAYERS,
    ),
    "async_tensor_model_parallel_allreduce": "it is always on",
    **dict.fromkeys(
        (
            *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "defer_embedding_wgrad_compute"),
            "wgrad_deferral_limit",
        ),
        _HEAD,
    ),
    **dict.fromkeys(("batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm", "use_ring_exchange_p2p"), _SCHEDULE),
    "pipeline_model_parallel_comm_backend": "process groups are those of the device",
    "barrier_with_L1_time": "verl measures times itself",
    "use_fused_weighted_squared_relu": "the activation is SwiGLU",
    **dict.fromkeys(
        (
            *("use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_naive_l2norm", "use_fused_mhc"),
            *("context_parallel_algo", "apply_dsa_kernel_fusion"),
        ),
        _OTHER_LIBRARY,
    ),
}
"""Fields of speed and memory of parts that are replaced here, and why they have no effect."""

_MODEL_FIELDS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("softmax_scale", "softmax_type", "hidden_dropout", "attention_dropout", "fp32_residual_connection"),
    *("apply_residual_connection_post_layernorm", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
    *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "glu_linear_offset"),
    *("activation_func_clamp_value", "num_moe_experts", "rotary_interleaved", "window_size", "window_attn_skip_freq"),
    *("normalization", "qk_layernorm", "qk_l2_norm", "qk_clip", "qk_clip_alpha", "qk_clip_threshold"),
    *("attention_output_gate", "multi_latent_attention", "no_rope_freq", "experimental_attention_variant"),
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_loss_coeff"),
    *("dsa_indexer_use_sparse_loss", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "calculate_per_token_loss"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq", "moe_ffn_hidden_size"),
    *("moe_router_topk", "moe_router_topk_limited_devices"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_score_function", "moe_router_force_load_balancing", "moe_input_jitter_eps"),
    *("moe_token_dropping", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
    *("moe_token_drop_policy", "moe_apply_probs_on_input", "moe_latent_size", "mrope_section"),
    *("is_hybrid_model", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    "heterogeneous_block_specs",
)
_BY_TRANSFORMER_ENGINE = (
    *("fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory", "fp8_margin", "fp8_interval"),
    *("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention"),
    *("fp8_multi_head_attention", "tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    *("num_layers_at_end_in_bf16", "fp4", "fp4_recipe", "fp4_param", "fp4_quantizer_factory", "quant_recipe"),
    *("activation_func_fp8_input_store", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
    *("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend", "cpu_offloading"),
    *("cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
    *("cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules"),
    *("min_offloaded_tensor_size", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope"),
    *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps"),
)
_PREDICTION_FIELDS = ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_standalone")
_ENGINE_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("params_dtype", "pipeline_dtype", "bf16", "fp16", "enable_autocast", "autocast_dtype"),
    *("variable_seq_lengths", "perform_initialization", "use_cpu_initialization"),
    *("distribute_saved_activations", "num_microbatches_with_partial_activation_checkpoints", "moe_layer_recompute"),
    *("moe_extended_tp", "moe_enable_routing_replay", "deterministic_mode", "batch_invariant_mode"),
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        _MODEL_FIELDS,
        (
            "it changes the model, which is built as its Hugging Face config says",
            "leave it out; model.override_config changes entries of that config",
        ),
    ),
    **dict.fromkeys(
        _BY_TRANSFORMER_ENGINE,
        ("it needs the layers of TransformerEngine, which are not used here", "leave it out"),
    ),
    **dict.fromkeys(
        _PREDICTION_FIELDS,
        (
            "the model's config says how many heads of multi-token prediction it has",
            "leave it out, and set actor_rollout_ref.model.mtp (mtp_loss_scaling_factor, enable_train ...)",
        ),
    ),
    **dict.fromkeys(
        _ENGINE_FIELDS,
        ("verl sets this field itself, from the keys of the section `megatron`", "leave it out, and set those keys"),
    ),
}
"""Fields that may not be set, each with the cause and the remedy."""


def flag_problems(override: Mapping[str, object], path: str) -> Iterator[Problem]:
    """Yield entries that are unknown, that change the model, or whose value megatron-core does not take.

    Args:
        override: the entries.
        path: key of the section that has them.
    """
    fields = [*RECOMPUTE, *PIPELINE_LAYOUT, *PASSED, *ROUTERS]
    for name, value in override.items():
        if name in _REFUSED:
            cause, remedy = _REFUSED[name]
            yield Problem(f"{path}.{name}", value, cause, remedy=remedy)
        elif name in PASSED:
            allowed = PASSED[name]
            if value is not None and not _is_allowed(value, allowed):
                values = allowed if isinstance(allowed, str) else ", ".join(str(option).lower() for option in allowed)
                yield Problem(f"{path}.{name}", value, "this value cannot be used here", f"{values}, null")
        elif name not in fields and name not in IDLE:
            near = difflib.get_close_matches(name, [*fields, *IDLE, *_REFUSED], n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(
                f"{path}.{name}", value, "megatron-core's model config has no such field", ", ".join(fields), remedy
            )
    yield from _router_problems(override, path)
    if override.get("moe_enable_deepep") and override.get("moe_token_dispatcher_type") != "flex":
        cause = "DeepEP is one of the exchanges of moe_token_dispatcher_type=flex"
        yield Problem(
            f"{path}.moe_enable_deepep", True, cause, "false", f"or set {path}.moe_token_dispatcher_type=flex"
        )


def _router_problems(override: Mapping[str, object], path: str) -> Iterator[Problem]:
    """Yield values of losses of routers and of updates of their biases that are wrong for any model."""
    for name in (*ROUTER_LOSSES, _BIAS_RATE):
        value = override.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            yield Problem(f"{path}.{name}", value, "this value cannot be used here", "a number from 0, null")
    if not isinstance(value := override.get(_BIAS), bool | None):
        yield Problem(f"{path}.{_BIAS}", value, "this value cannot be used here", "true, false, null")
    if (kind := override.get(_BALANCING)) not in ("aux_loss", "none", None):
        cause = "the balance loss is that of whole mini-batches"
        yield Problem(f"{path}.{_BALANCING}", kind, cause, "aux_loss, none, null")
    elif kind == "none" and override.get(ROUTER_LOSSES[0]):
        cause = f"{ROUTER_LOSSES[0]}={override[ROUTER_LOSSES[0]]} asks for a balance loss"
        yield Problem(f"{path}.{_BALANCING}", kind, cause, "aux_loss, null")


def _is_allowed(value: object, allowed: tuple[object, ...] | str) -> bool:
    if isinstance(allowed, str):
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    return any(type(option) is type(value) and option == value for option in allowed)
