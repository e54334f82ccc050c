"""LoRA under the names of Megatron (``model.lora.rank`` ...), as settings of ``model.lora_rank`` and its neighbours.

``linear_qkv`` of megatron-core is three layers of a Transformers model, and ``linear_fc1`` two; in a mixture of experts
``linear_fc1`` and ``linear_fc2`` are those of the experts, of shared experts, and of layers without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from verl.config import Problem
from verl.utils.model_facts.experts import ExpertSizes
from verl.utils.model_facts.model_files import config_entries

SECTIONS = ("actor_rollout_ref.model", "critic.model", "model")
"""Sections of models that may be trained."""

DEFAULTS: Mapping[str, object] = {
    "alpha": 32,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
}
"""Settings beside ``rank``, and their values where they are not set."""

LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Layer of megatron-core → the layers of Transformers that it computes."""

LATENT_LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""The same, of multi-head latent attention, which has them in place of :data:`NOT_LATENT`."""
NOT_LATENT = ("linear_qkv", "linear_q", "linear_k", "linear_v")

_EXPERT_WEIGHTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Layer of megatron-core → the weight of all experts of a layer in Transformers."""


def settings_of(section: str, path: object, lora: Mapping[str, object]) -> tuple[dict[str, object], list[Problem]]:
    """Return the settings below ``section`` that say the same as ``lora``, by their key, and what cannot be said.

    Args:
        section: of the model, such as ``actor_rollout_ref.model``.
        path: of the model; a local folder tells whether it is a mixture of experts.
        lora: the section ``lora``, with a ``rank``.
    """
    values = {name: lora.get(name, default) for name, default in DEFAULTS.items()}
    fields = config_entries(Path(path).expanduser()) if isinstance(path, str) and "${" not in path else {}
    experts = ExpertSizes.from_config(SimpleNamespace(**fields))
    has_others = experts is None or experts.shared_width > 0 or not all(experts.sparse)
    is_latent = fields.get("kv_lora_rank") is not None
    settings: dict[str, object] = {"lora_rank": lora["rank"], "lora_alpha": values["alpha"]}
    problems: list[Problem] = []
    weights: dict[str, None] = {}
    for key in ("target_modules", "exclude_modules"):
        names: dict[str, None] = {}
        patterns = values[key]
        for name in [patterns] if isinstance(patterns, str) else list(patterns or ()):  # type: ignore[call-overload]
            if is_latent and name in NOT_LATENT:
                cause = f"{fields.get('model_type')} has latent attention, without this layer"
                allowed = ", ".join((*LATENT_LAYERS, *(layer for layer in LAYERS if layer not in NOT_LATENT)))
                remedy = f"set {section}.lora.{key}=[linear_q_up_proj,linear_kv_up_proj,linear_proj]"
                problems.append(Problem(f"{section}.lora.{key}", name, cause, allowed, remedy))
            elif key == "target_modules" and experts is not None and name in _EXPERT_WEIGHTS:
                weights[_EXPERT_WEIGHTS[name]] = None
                names |= dict.fromkeys(LAYERS[name] if has_others else ())
            elif "*" in str(name):
                cause = "patterns of megatron-core's names are not translated"
                remedy = f"choose layers by a regular expression of Transformers' names in {section}.{key}"
                problems.append(Problem(f"{section}.lora.{key}", name, cause, ", ".join(LAYERS), remedy))
            else:
                names |= dict.fromkeys({**LAYERS, **LATENT_LAYERS}.get(str(name), (str(name),)))
        settings[key] = list(names) or None
    if settings["target_modules"] is None and not problems:
        cause = "no layer of attention gets adapters, which megatron-core's names can only say of a dense model"
        problems.append(Problem(f"{section}.lora.target_modules", values["target_modules"], cause, "with linear_qkv"))
    if settings["target_modules"] == ["all-linear"]:
        settings["target_modules"] = "all-linear"
    if weights:
        settings["lora.target_parameters"] = list(weights)
    return {f"{section}.{key}": value for key, value in settings.items() if value is not None}, problems


def spelling_of(key: str) -> str:
    """Return the key under Megatron's names that :func:`settings_of` translates to ``key``."""
    section, _, name = key.removesuffix("lora.target_parameters").rpartition(".")
    return f"{section}.lora.{name.removeprefix('lora_') or 'target_modules'}"
