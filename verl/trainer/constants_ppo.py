"""The environment of a PPO run's processes on Ray, for programs that call ``ray.init`` themselves."""

from __future__ import annotations

import os

from verl.single_controller.ray.private import SETTINGS


def get_ppo_ray_runtime_env(config: object = None) -> dict[str, object]:
    """Return a ``runtime_env`` for ``ray.init`` with the settings that a run of verl makes when it starts Ray itself.

    Settings that this process's environment has are left out: Ray's processes inherit it.

    Args:
        config: the run's configuration; no setting depends on it.
    """
    return {"env_vars": {name: value for name, value in SETTINGS.items() if name not in os.environ}}
