"""Prompts that responses share: which models and layouts cannot share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config import PPOConfig
from verl.trainer.config.rules_sizes import needs_critic
from verl.utils.model_facts import model_files
from verl.utils.model_facts.config_fields import layers_beyond_attention
from verl.vision.families import FAMILIES

ACTOR = "actor_rollout_ref.actor"


def without_sharing(config: PPOConfig) -> tuple[PPOConfig, list[str]]:
    """Turn ``use_prefix_grouper`` off where prompts cannot be shared, which changes time and no number.

    Returns:
        the configuration, and a message about each section in which it was turned off.
    """
    remarks = []
    if reasons := list(_of_policy(config)):
        actor = replace(config.actor_rollout_ref.actor, use_prefix_grouper=False)
        config = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor))
        remarks.append(f"no effect: {ACTOR}.use_prefix_grouper ({'; '.join(reasons)})")
    if reasons := list(_of_critic(config)):
        config = replace(config, critic=replace(config.critic, use_prefix_grouper=False))
        remarks.append(f"no effect: critic.use_prefix_grouper ({'; '.join(reasons)})")
    return config, remarks


def _of_policy(config: PPOConfig) -> Iterator[str]:
    """Yield why policy and reference cannot compute a prompt once for all its responses, if they are to."""
    roles = config.actor_rollout_ref
    if not roles.actor.use_prefix_grouper:
        return
    yield from _of_model(roles.model.path, roles.model.override_config)
    if "megatron" in (roles.actor.strategy, roles.ref.strategy):
        yield "strategy=megatron computes every row with its own prompt"
    if not (roles.model.use_remove_padding and roles.actor.use_remove_padding):
        yield "a prompt is shared in packed rows, which need actor_rollout_ref.model.use_remove_padding=true"
    if (mode := roles.actor.router_replay.mode) != "disabled":
        yield f"{ACTOR}.router_replay.mode={mode} repeats the choice of experts of every row"


def _of_critic(config: PPOConfig) -> Iterator[str]:
    """Yield why the critic cannot, if it is to."""
    critic = config.critic
    if not (critic.use_prefix_grouper and needs_critic(config)):
        return
    yield from _of_model(critic.model.path, critic.model.override_config)
    if critic.strategy == "megatron":
        yield "strategy=megatron computes every row with its own prompt"
    if not critic.model.use_remove_padding:
        yield "a prompt is shared in packed rows, which need critic.model.use_remove_padding=true"


def _of_model(path: str, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a model may not share prompts."""
    folder = Path(path).expanduser()
    other = layers_beyond_attention(model_files.layer_types(folder))
    overrides = {**overrides, **(overrides.get("text_config") or {})}
    if model_files.model_type(folder) in FAMILIES:
        yield "prompts with images are not shared"
    if other:
        yield f"the model has layers ({', '.join(other)}) other than full or sliding attention"
    if overrides.get("output_router_logits") or "router_aux_loss_coef" in overrides:
        yield (
            "the load of experts (router_aux_loss_coef, output_router_logits) is balanced over the tokens of every row"
        )
