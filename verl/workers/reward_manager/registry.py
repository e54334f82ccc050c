"""Reward managers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

M = TypeVar("M", bound=type[AbstractRewardManager])

REWARD_MANAGERS: Registry[type[AbstractRewardManager]] = Registry("reward manager")


def register(name: str) -> Callable[[M], M]:
    """Class decorator that files a reward manager under ``name``."""
    return cast(Any, REWARD_MANAGERS.register(name))


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The reward manager called ``name``; an unknown name is an error that lists those that exist."""
    return REWARD_MANAGERS.get(name)
