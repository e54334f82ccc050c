"""Fixtures that several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray warns (and pauses) about devices that it should not hide when none are asked for.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import logging

import pytest


@pytest.fixture(autouse=True)
def own_logging_level() -> Iterator[None]:
    """A run in this process sets the level of verl's loggers; the next test starts with the one before."""
    verl = logging.getLogger("verl")
    before = verl.level
    yield
    verl.setLevel(before)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One real Ray for the whole test session, with room for four one-core workers."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
