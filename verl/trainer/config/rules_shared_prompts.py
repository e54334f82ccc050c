"""Rule about prompts that responses share: which models and layouts cannot share them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.config import PPOConfig, Problem
from verl.utils import model_files
from verl.vision.families import FAMILIES

ACTOR = "actor_rollout_ref.actor"


def shared_prompts(config: PPOConfig) -> Iterator[Problem]:
    """The policy and the reference can compute a prompt once for all its responses."""
    roles = config.actor_rollout_ref
    actor, folder, key = roles.actor, Path(roles.model.path).expanduser(), f"{ACTOR}.use_prefix_grouper"
    if not actor.use_prefix_grouper:
        return
    overrides = roles.model.override_config
    overrides = {**overrides, **(overrides.get("text_config") or {})}
    other = set(model_files.layer_types(folder)) - {"full_attention", "sliding_attention"}
    reasons = {
        "strategy=megatron computes every row with its own prompt": (
            "megatron" in (actor.strategy, roles.ref.strategy)
        ),
        "a prompt is shared in packed rows (actor_rollout_ref.model.use_remove_padding=true)": not (
            roles.model.use_remove_padding and actor.use_remove_padding
        ),
        "prompts with images are not shared": model_files.model_type(folder) in FAMILIES,
        f"the model has layers ({', '.join(sorted(other))}) other than full or sliding attention": other,
        f"{ACTOR}.router_replay.mode={actor.router_replay.mode} repeats the choice of experts of every row": (
            actor.router_replay.mode != "disabled"
        ),
        "the load of experts (router_aux_loss_coef, output_router_logits) is balanced over the tokens of every row": (
            overrides.get("output_router_logits") or "router_aux_loss_coef" in overrides
        ),
    }
    for wrong in (reason for reason, holds in reasons.items() if holds):
        yield Problem(key, True, wrong, "false")
