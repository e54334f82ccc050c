"""Small sections at the root of the configuration."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.workers.config.checkpoint import CheckpointConfig

__all__ = [
    "CheckpointConfig",
    "CustomRewardFunctionConfig",
    "ModuleConfig",
    "RayConfig",
    "RewardManagerConfig",
    "TransferQueueConfig",
]


@section
class ModuleConfig(BaseConfig):
    """A class in a file of yours."""

    hydra_target: ClassVar[str] = "verl.trainer.config.config.ModuleConfig"

    path: str | None = setting(None, path=True)
    """File that holds the class."""
    name: str = setting("custom_reward_manager")
    """Name of the class."""


@section
class RewardManagerConfig(BaseConfig):
    """Which reward manager, and where it comes from."""

    hydra_target: ClassVar[str] = "verl.trainer.config.config.RewardManagerConfig"

    source: Literal["register", "importlib"] = setting("register")
    """A registered name, or the class in `module`."""
    name: str = setting("naive", interpolation="${oc.select:reward_model.reward_manager,naive}")
    """Registered reward manager."""
    module: ModuleConfig = subsection(ModuleConfig)
    """A reward manager class of your own, with `source=importlib`."""


@section
class CustomRewardFunctionConfig(BaseConfig):
    """A scorer of your own."""

    path: str | None = setting(None, path=True)
    """Python file that holds the function; null scores by data source."""
    name: str = setting("compute_score")
    """Name of the function."""
    reward_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the function."""


def _ray_init() -> dict[str, Any]:
    return {"num_cpus": None}


@section
class RayConfig(BaseConfig):
    """How Ray is started."""

    ray_init: dict[str, Any] = setting(factory=_ray_init)
    """Arguments of `ray.init`; `num_cpus` null lets Ray count."""
    timeline_json_file: str | None = setting(None)
    """File for Ray's timeline at the end of the run."""


@section
class TransferQueueConfig(BaseConfig):
    """A queue of samples between stages."""

    enable: bool = setting(False, refuse="the transfer queue is not in this version; set transfer_queue.enable=false")
    """Send batches through the queue."""
