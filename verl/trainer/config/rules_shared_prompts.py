"""Rule about prompts that responses share: which models and layouts cannot share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config import PPOConfig, Problem
from verl.trainer.config.rules_sizes import needs_critic
from verl.utils import model_files
from verl.vision.families import FAMILIES

ACTOR = "actor_rollout_ref.actor"


def shared_prompts(config: PPOConfig) -> Iterator[Problem]:
    """Policy, reference and critic can compute a prompt once for all its responses, if they are to."""
    roles, critic = config.actor_rollout_ref, config.critic
    if roles.actor.use_prefix_grouper:
        mode = roles.actor.router_replay.mode
        reasons = _of_model(roles.model.path, roles.model.override_config) | {
            "strategy=megatron computes every row with its own prompt": (
                "megatron" in (roles.actor.strategy, roles.ref.strategy)
            ),
            "a prompt is shared in packed rows, which need actor_rollout_ref.model.use_remove_padding=true": not (
                roles.model.use_remove_padding and roles.actor.use_remove_padding
            ),
            f"{ACTOR}.router_replay.mode={mode} repeats the choice of experts of every row": mode != "disabled",
        }
        yield from _problems(f"{ACTOR}.use_prefix_grouper", reasons)
    if critic.use_prefix_grouper and needs_critic(config):
        reasons = _of_model(critic.model.path, critic.model.override_config) | {
            "strategy=megatron computes every row with its own prompt": critic.strategy == "megatron",
            "a prompt is shared in packed rows, which need critic.model.use_remove_padding=true": (
                not critic.model.use_remove_padding
            ),
        }
        yield from _problems("critic.use_prefix_grouper", reasons)


def _of_model(path: str, overrides: Mapping[str, Any]) -> dict[str, bool]:
    """Return why a model may not share prompts, and whether it is so."""
    folder = Path(path).expanduser()
    other = set(model_files.layer_types(folder)) - {"full_attention", "sliding_attention"}
    overrides = {**overrides, **(overrides.get("text_config") or {})}
    return {
        "prompts with images are not shared": model_files.model_type(folder) in FAMILIES,
        f"the model has layers ({', '.join(sorted(other))}) other than full or sliding attention": bool(other),
        "the load of experts (router_aux_loss_coef, output_router_logits) is balanced over the tokens of every row": (
            bool(overrides.get("output_router_logits")) or "router_aux_loss_coef" in overrides
        ),
    }


def _problems(key: str, reasons: Mapping[str, bool]) -> Iterator[Problem]:
    for wrong in (reason for reason, holds in reasons.items() if holds):
        yield Problem(key, True, wrong, "false")
