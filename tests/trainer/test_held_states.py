"""Which of the states in memory a run goes on from: snapshots of the ranks arrive later than they are asked for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import RunState, TrainerCheckpoint
from verl.config.trainer import RecoveryConfig
from verl.errors import ProcessLostError
from verl.supervision.termination import Termination
from verl.trainer.recovery import PassLimits, Recovery
from verl.utils.deferred import Deferred


class Ranks:
    """Ranks whose snapshots of some steps arrive."""

    outputs_survive_workers = True

    def __init__(self, arriving: set[int]) -> None:
        self.arriving = arriving
        self.restored: list[int] = []

    def documents(self) -> list[dict[str, bytes]]:
        return [{}]

    def execute_all_async(self, method: str, step: int) -> int:
        assert method == "snapshot"
        return step

    def wait_until_made(self, step: int) -> None:
        pass

    def outputs_arrived(self, step: int) -> bool:
        return step in self.arriving

    def restore(self, step: int) -> None:
        self.restored.append(step)


class Steps:
    """A run that only counts its steps; what is sampled after some of them is lost or not complete."""

    def __init__(self, ranks: Ranks, lost: set[int], under_way: set[int]) -> None:
        self.global_steps = 0
        self.lost, self.under_way = lost, under_way
        self.trained_groups: dict[str, Any] = {"actor": ranks}

    def state(self) -> RunState:
        sampled: Future[None] = Future()
        if self.global_steps in self.lost:
            sampled.set_exception(ProcessLostError("a rank that samples was killed"))
        elif self.global_steps not in self.under_way:
            sampled.set_result(None)
        pending = Deferred([sampled], dict)
        return RunState(global_step=self.global_steps, dataloader={}, controllers={}, rng={}, pending=pending)

    def restore(self, state: RunState) -> None:
        self.global_steps = state.global_step

    def resume(self) -> None:
        pytest.fail("there is a state to go on from")

    def restart_workers(self) -> None:
        pass

    def restart_rollout_pool(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("arriving", "lost", "under_way", "goes_on_after"),
    [
        ({1, 2, 3}, set(), set(), 3),
        ({1, 2}, set(), set(), 2),
        ({1}, set(), set(), 1),
        (set(), set(), set(), 0),
        ({1, 2, 3}, {3}, set(), 2),
        ({1, 2, 3}, set(), {3}, 2),
    ],
)
def test_a_lost_run_goes_on_from_the_newest_state_that_is_whole(arriving, lost, under_way, goes_on_after, tmp_path):
    """The last one that is whole is kept beside a newer one; one that has not arrived by the next step is dropped."""
    ranks = Ranks(arriving)
    run = Steps(ranks, lost, under_way)
    checkpoint = TrainerCheckpoint(CheckpointPlan(root=str(tmp_path)), run.trained_groups)
    settings = RecoveryConfig(snapshot_freq=1, backoff_s=0.0)
    recovery = Recovery(settings, run, checkpoint, PassLimits(may_cut=True), Termination())
    recovery.snapshot()
    for step in (1, 2, 3):
        run.global_steps = step
        recovery.snapshot()
        recovery.snapshot()  # once more for the same step: nothing
    assert recovery.can_save == bool(arriving)
    with recovery.guard():
        run.global_steps = 4  # under way
        raise ProcessLostError("a rank was killed")
    assert run.global_steps == goes_on_after
    assert ranks.restored == [goes_on_after] * (goes_on_after > 0)
    assert recovery.metrics()["recovery/redone_steps"] == 3 - goes_on_after
