"""The section ``reward``, in which the releases of verl have what is in three sections here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.config import PPOConfig
from verl.trainer.config.keys import default_tree, get, merged, put

ConfigT = TypeVar("ConfigT", bound="DictConfig | PPOConfig")

_MOVED = {
    "reward_model.num_workers": "num_workers",
    "reward_model.reward_kwargs": "reward_kwargs",
    "reward_model.sandbox_fusion": "sandbox_fusion",
    "reward_model.enable": "reward_model.enable",
    "reward_model.enable_resource_pool": "reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node": "reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward_model.nnodes",
    "reward_model.model.path": "reward_model.model_path",
    "reward_model.rollout": "reward_model.rollout",
    "reward_manager": "reward_manager",
    "custom_reward_function": "custom_reward_function",
}
"""Key here to its key in the section ``reward``."""


def reward_section(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return the section ``reward`` of a configuration: what it has itself, and the rest from the sections here."""
    values = merged(default_tree(PPOConfig), tree)
    section: dict[str, object] = {}
    for here, there in _MOVED.items():
        put(section, there, get(values, here))
    return merged(section, tree.get("reward") or {})


def migrate_legacy_reward_impl(config: ConfigT) -> ConfigT:
    """Give a composed configuration the section ``reward`` too, for code that reads it there; both spellings hold.

    Returns:
        the same ``DictConfig``, changed in place; a typed configuration as it is.
    """
    if isinstance(config, DictConfig):
        tree: Any = OmegaConf.to_container(config, resolve=False)
        with open_dict(config):
            config.reward = reward_section(tree)
    return config
