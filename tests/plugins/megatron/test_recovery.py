"""Runs with strategy=megatron whose ranks are killed, frozen, or out of disk space: nothing in the metrics shows it."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

import pytest
import ray

from tests.plugins.megatron.test_run import layout
from tests.trainer.test_recovery import FragileTrainer, Outcome, Run, assert_same_run, pid_of, root, run
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.trainer import PPOTrainer

pytest.importorskip("verl.plugins.megatron.library")

pytestmark = pytest.mark.slow
__all__ = ["root", "run"]

LAYOUTS = {"tensor": layout(2, tensor=2), "pipeline": layout(2, pipeline=2), "data": layout(2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def settings(name: str) -> dict[str, Any]:
    return LAYOUTS[name]


@pytest.fixture(scope="module")
def undisturbed(run: Run, name: str, settings: dict[str, Any]) -> Outcome:
    return run(f"undisturbed {name}", [], **settings)


class FrozenTrainer(FragileTrainer):
    """Stops a rank, which then neither answers nor ends."""

    def _harm(self, rank: int) -> None:
        os.kill(pid_of(self.policy_workers, rank), signal.SIGSTOP)


class FullDiskTrainer(FragileTrainer):
    """Lets no file of a rank grow beyond 4 KiB until the next step."""

    def _harm(self, rank: int) -> None:
        self._limit(rank, 4096)

    def _begin_save(self) -> None:
        super()._begin_save()
        if self.global_steps == 2:
            self._limit(1, resource.RLIM_INFINITY)

    def _limit(self, rank: int, size: int) -> None:
        def set_limit(_: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        ray.get(self.policy_workers.workers[rank].__ray_call__.remote(set_limit))


def runner(trainer: type[PPOTrainer]) -> type[TaskRunner]:
    class Runner(TaskRunner):
        def trainer_class(self) -> type[PPOTrainer]:
            return trainer

    return Runner


def test_killed_ranks(run: Run, settings: dict[str, Any], undisturbed: Outcome, name: str) -> None:
    """Rank 1 in the first rollout, rank 0 in the second update, rank 1 while the second step is saved."""
    deaths = [(1, "gen", 1), (2, "update_actor", 0), (2, "save_checkpoint", 1)]
    disturbed = run(f"killed {name}", deaths, **settings)
    assert_same_run(disturbed, undisturbed)
    assert [disturbed[0][step]["recovery/restarts"] for step in (1, 3)] == [1, 3]


def test_a_frozen_rank(run: Run, settings: dict[str, Any], undisturbed: Outcome, name: str) -> None:
    patience = {"trainer__recovery__hang_timeout_s": 60}
    disturbed = run(f"frozen {name}", [(2, "update_actor", 1)], runner(FrozenTrainer), **settings, **patience)
    assert_same_run(disturbed, undisturbed)
    assert disturbed[0][2]["recovery/restarts"] == 1


def test_a_full_disk(run: Run, settings: dict[str, Any], undisturbed: Outcome, name: str) -> None:
    disturbed = run(f"full {name}", [(2, "save_checkpoint", 1)], runner(FullDiskTrainer), **settings)
    assert_same_run(disturbed, undisturbed)
    assert disturbed[0][3]["recovery/failed_saves"] == 1
