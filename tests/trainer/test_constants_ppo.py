"""What a program that calls ``ray.init`` itself gives to Ray's processes."""

from __future__ import annotations

import pytest

from verl.trainer.main_ppo import get_ppo_ray_runtime_env


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch):
    names = ("ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "free_objects_period_milliseconds", "prestart_worker_first_driver")
    for name in names:
        monkeypatch.delenv(f"RAY_{name}", raising=False)
    assert get_ppo_ray_runtime_env()["env_vars"] == {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_free_objects_period_milliseconds": "10",
        "RAY_prestart_worker_first_driver": "0",
    }
    monkeypatch.setenv("RAY_free_objects_period_milliseconds", "1000")
    assert "RAY_free_objects_period_milliseconds" not in get_ppo_ray_runtime_env()["env_vars"]
