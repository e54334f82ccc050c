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
# Hundreds of processes load verl: the first of them compiles it for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import logging
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from verl.base.registry import scoped_registrations

pytest.register_assert_rewrite("verl.testing", "tests.support")
sys.dont_write_bytecode = False
# `nohup` and a shell's `&` leave these ignored, for every process that is started from here too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SEARCHES = "VERL_TEST_SEED" in os.environ
"""``make test SEARCH=1``: random tests draw from the seed of this variable; else they draw the same in every run."""
SEED = int(os.environ.get("VERL_TEST_SEED", "0"))

with suppress(ModuleNotFoundError):  # the environments of engines lack it
    from hypothesis import HealthCheck, settings

    # Other tests run beside these, so the time of one example says nothing.
    settings.register_profile(
        "verl", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not SEARCHES
    )
    settings.load_profile("verl")


LONGEST = (
    "tests/trainer/test_recovery.py",
    "tests/single_controller",
    "tests/trainer/test_killed_runs.py",
    "tests/workers/rollout/test_remote.py",
    "tests/trainer/test_run.py",
    "tests/trainer/test_algorithms_end_to_end.py",
    "tests/trainer/test_own_fit.py",
    "tests/examples/test_recipes.py",
    "tests/supervision/test_termination.py",
    "tests/trainer/test_bad_days.py",
    "tests/agents/test_agent_loops.py",
    "tests/security/test_secrets_in_a_run.py",
    "tests/trainer/test_reward_kills.py",
    "tests/trainer/test_engine_kills.py",
    "tests/trainer/ppo/test_old_log_probs.py",
    "tests/supervision/test_pool_kills.py",
    "tests/workers/engine/test_sequence_parallel.py",
    "tests/plugins/megatron/test_experts.py",
    "tests/plugins/megatron/test_ranks.py",
    "tests/plugins/megatron/test_run.py",
)
"""In parallel runs these begin first, so that none of them is left for the end, when nothing else is left to run."""


def unit_of(nodeid: str) -> str:
    """What one process runs in a parallel run: a file, or ``single_controller``, whose files share worker groups."""
    file = nodeid.partition("::")[0]
    return "tests/single_controller" if "tests/single_controller/" in file else file


def pytest_configure(config: pytest.Config) -> None:
    """Tests run as on a machine without a GPU, and so do the processes that they start, except with ``-m gpu``."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # PyTorch reads it when it first counts devices, not when it is imported
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units in the order in which they were collected, with ``--dist loadfile``."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run: the longest units first, then those with the most tests."""
    if hasattr(config, "workerinput"):
        sizes = Counter(unit_of(item.nodeid) for item in items)
        units = sorted(sizes, key=lambda unit: (LONGEST.index(unit) if unit in LONGEST else len(LONGEST), -sizes[unit]))
        places = {unit: place for place, unit in enumerate(units)}
        items.sort(key=lambda item: places[unit_of(item.nodeid)])


@pytest.fixture(autouse=True)
def own_logging_level() -> None:
    """A run in this process sets the level of verl's loggers, be it a test's or that of a fixture of many tests."""
    logging.getLogger("verl").setLevel(logging.NOTSET)


def seed_all() -> None:
    """Seed the generators that a test may draw from without a seed of its own."""
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):  # a test that draws from it has imported it
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="module")
def seeded_fixtures_of_the_file() -> None:
    """What fixtures of a file draw is the same in every run."""
    seed_all()


@pytest.fixture(autouse=True)
def seeded(seeded_fixtures_of_the_file: None) -> None:
    """What a test draws is the same in every run, alone or after others."""
    seed_all()


@pytest.fixture(autouse=True, scope="module")
def forget_what_modules_register() -> Iterator[None]:
    """Fixtures of a file may register estimators, losses, reward managers and the like for all of its tests."""
    with scoped_registrations():
        yield


@pytest.fixture(autouse=True)
def forget_what_tests_register(forget_what_modules_register: None) -> Iterator[None]:
    """No test finds a name that another one registered."""
    with scoped_registrations():
        yield


@pytest.fixture(autouse=True)
def empty_memory_file_system() -> Iterator[None]:
    """The files of ``memory://`` belong to the process; no test finds those of another."""
    yield
    if memory := sys.modules.get("fsspec.implementations.memory"):
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One real Ray for the whole test session, with room for four one-core workers."""
    import ray

    if sys.platform == "linux":
        from tests import ray_forks

        ray_forks.install()
    # Its own, also where others have left the address of theirs in a file.
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
