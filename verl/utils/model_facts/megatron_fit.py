"""Report parts of a model that `strategy=megatron` cannot build or divide, from the entries of its config alone.

A run asks before it starts, of config.json; an engine asks when it loads a model, of Transformers' config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from verl.config import McoreEngineConfig, Problem
from verl.config.megatron import GROUPED, HYBRIDS, MEGATRON_FAMILIES, MIXTURES
from verl.config.megatron_flags import ROUTER_LOSSES, bias_update_rate
from verl.config.pipeline_layout import division_problem, layers_of_chunks
from verl.utils.model_facts.config_fields import random_fields, rope_rules, rope_type
from verl.utils.model_facts.experts import ExpertSizes

_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Entries that megatron-core's layers, as we build them, cannot follow; a config without one means the same."""

_REMEDIES = {
    "mimo": (
        "or, as MiMo is Qwen2 with heads of multi-token prediction: in a copy of its folder, set model_type to qwen2 "
        "and architectures to [Qwen2ForCausalLM] in config.json, and take auto_map out; the heads are not trained then"
    ),
}
"""Remedies for families whose layers are those of another one."""

_QUERY_BIAS = ("glm4_moe", "attention_bias")


def misfits(fields: Mapping[str, object], engine: McoreEngineConfig, sizes: str, strategy: str) -> Iterator[Problem]:
    """Yield what stands between a model and a layout.

    Args:
        fields: entries of config.json, or of Transformers' ``config.to_dict()``; missing sizes are not checked.
        engine: the layout; a frozen model (``forward_only``) may have dropout.
        sizes: section of the layout's keys.
        strategy: key of the strategy.
    """
    text = fields.get("text_config")
    if isinstance(text, Mapping):  # a model with images; its own entries count over the decoder's
        fields = {**text, **fields}
    if (kind := fields.get("model_type")) not in MEGATRON_FAMILIES:
        remedy = _REMEDIES.get(str(kind), f"or a model of {', '.join(MEGATRON_FAMILIES)}")
        yield Problem(strategy, "megatron", f"it has no {kind} models", "fsdp2", remedy)
        return
    for reason in _unbuildable(fields):
        yield Problem(strategy, "megatron", f"it cannot build this {kind}, whose config has {reason}", "fsdp2")
    if noise := {} if engine.forward_only else random_fields(fields):
        reason = f"it trains without noise, and the config has {', '.join(f'{k}={v}' for k, v in noise.items())}"
        remedy = f"or set it to 0 in override_config: {{{', '.join(f'{name}: 0' for name in noise)}}}"
        yield Problem(strategy, "megatron", reason, "fsdp2", remedy)
    yield from _routers(str(kind), engine, sizes)
    if kind in HYBRIDS:
        yield from _recurrent(str(kind), engine, sizes)
    yield from _divisions(fields, engine, sizes)
    yield from _deepstack(fields, engine, sizes)


def _routers(kind: str, engine: McoreEngineConfig, sizes: str) -> Iterator[Problem]:
    """Biases are those of routers that choose groups, and losses of routers need some."""
    override = engine.override_transformer_config
    path = f"{sizes}.override_transformer_config"
    if (rate := bias_update_rate(override)) and kind not in GROUPED:
        cause = f"routers of {kind} have no bias that could be updated; those of {', '.join(GROUPED)} do"
        yield Problem(f"{path}.moe_router_bias_update_rate", rate, cause, "0, null")
    for name in ROUTER_LOSSES:
        if override.get(name) and kind not in MIXTURES:
            yield Problem(f"{path}.{name}", override[name], f"{kind} has no experts", "0, null")


def _recurrent(kind: str, engine: McoreEngineConfig, sizes: str) -> Iterator[Problem]:
    """Gated delta nets read a sequence from its first token on."""
    if engine.context_parallel_size > 1:
        reason = f"the recurrent layers of {kind} need all of a sequence, and each rank would see a part"
        key = "context_parallel_size"
        yield Problem(f"{sizes}.{key}", engine[key], reason, "1 for this model", "or tensor_model_parallel_size")
    if engine.use_dist_checkpointing:
        reason = f"the names that megatron-core gives the weights of {kind} are not known here"
        yield Problem(f"{sizes}.use_dist_checkpointing", True, reason, "false, which reads the model's folder")


def _unbuildable(fields: Mapping[str, object]) -> Iterator[str]:
    # GLM-4.5's is that of Qwen2: of queries, keys and values alone.
    fixed = {name: value for name, value in _FIXED.items() if (fields["model_type"], name) != _QUERY_BIAS}
    yield from (f"{name}={fields[name]}" for name, value in fixed.items() if fields.get(name) not in (None, value))
    for rule in rope_rules(fields):
        name = rope_type(rule)
        if name in ("dynamic", "longrope"):
            yield f"rotary embeddings that change with length ({name})"
        if name == "yarn" and not _keeps_attention(rule):
            yield "rotary embeddings that scale attention (yarn without attention_factor: 1.0)"


def _keeps_attention(rule: Mapping[str, object]) -> bool:
    """Say whether yarn multiplies attention by 1: by its own factor, or by the ratio of two equal scales."""
    if (factor := rule.get("attention_factor")) is not None:
        return factor == 1
    return bool(rule.get("mscale")) and rule["mscale"] == rule.get("mscale_all_dim")


def _divisions(fields: Mapping[str, object], engine: McoreEngineConfig, sizes: str) -> Iterator[Problem]:
    """Ranks get equally many heads, columns, layers and experts."""
    tensor, context = engine.tensor_model_parallel_size, engine.context_parallel_size
    head_key = "tensor_model_parallel_size"
    by_context = " × context_parallel_size" if context > 1 else ""
    # A size that is no whole number, such as text in override_config, is for Transformers to refuse.
    fields = {name: value for name, value in fields.items() if isinstance(value, int) or name == "mlp_only_layers"}
    heads, experts = fields.get("num_attention_heads"), ExpertSizes.from_config(SimpleNamespace(**fields))
    parts = [
        (head_key, by_context, tensor * context, heads, "heads"),
        (head_key, "", tensor, fields.get("num_key_value_heads") or heads, "key/value heads"),
        (head_key, "", tensor, fields.get("linear_num_key_heads"), "key heads of recurrent layers"),
    ]
    if experts is None or not all(experts.sparse):
        parts.append((head_key, "", tensor, fields.get("intermediate_size"), "feed-forward columns"))
    if experts is not None:
        expert_key, column_key = "expert_model_parallel_size", "expert_tensor_parallel_size"
        columns = column_key if engine[column_key] else head_key
        parts.append((expert_key, "", engine[expert_key], experts.count, "experts"))
        parts.append((columns, "", engine[columns], experts.width, "columns of each expert"))
        if experts.shared_width:
            parts.append((head_key, "", tensor, experts.shared_width, "columns of shared experts"))
        yield from _experts(engine, sizes)
    if isinstance(layers := fields.get("num_hidden_layers"), int):
        stages, virtual = engine.pipeline_model_parallel_size, engine.virtual_pipeline_model_parallel_size
        if problem := division_problem(engine.override_transformer_config, stages, virtual, layers, sizes):
            yield problem
    for key, by, ranks, count, what in parts:
        if isinstance(count, int) and count % ranks:
            product = f"{key}{by}={ranks}" if by else "it"
            reason = f"{product} does not divide the model's {count} {what}"
            yield Problem(f"{sizes}.{key}", engine[key], reason, f"divisors of {count}{by and ' in all'}")


def _deepstack(fields: Mapping[str, object], engine: McoreEngineConfig, sizes: str) -> Iterator[Problem]:
    """Qwen3-VL adds features of images to the outputs of its first layers, which lie beside the vision tower."""
    vision, layers = fields.get("vision_config"), fields.get("num_hidden_layers")
    depths = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    if not depths or not isinstance(layers, int):
        return
    stages, virtual = engine.pipeline_model_parallel_size, engine.virtual_pipeline_model_parallel_size
    counts = layers_of_chunks(engine.override_transformer_config, stages, virtual, layers)
    first = layers // (stages * (virtual or 1)) if counts is None else counts[0]
    if first < len(depths):
        reason = (
            f"the first {len(depths)} layers take features of images and must be on the first stage, which has "
            f"{first} of the model's {layers}"
        )
        key = "pipeline_model_parallel_size"
        yield Problem(f"{sizes}.{key}", engine[key], reason, f"stages of >= {len(depths)} layers")


def _experts(engine: McoreEngineConfig, sizes: str) -> Iterator[Problem]:
    """Tokens reach each expert once."""
    if engine.tensor_model_parallel_size > 1 and not engine.sequence_parallel:
        reason = "every one of the ranks that share a layer would send each token to the experts"
        yield Problem(f"{sizes}.sequence_parallel", False, reason, "true for a mixture of experts")
