"""Which of the states in memory a run goes on from: snapshots of the ranks arrive later than they are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import RunState, TrainerCheckpoint
from verl.config.trainer import RecoveryConfig
from verl.errors import ProcessLostError
from verl.supervision.termination import Termination
from verl.trainer.recovery import PassLimits, Recovery


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
    """A run that only counts its steps."""

    def __init__(self, ranks: Ranks) -> None:
        self.global_steps = 0
        self.trained_groups: dict[str, Any] = {"actor": ranks}

    def state(self) -> RunState:
        return RunState(global_step=self.global_steps, dataloader={}, controllers={}, rng={})

    def go_on_from(self, state: RunState) -> None:
        self.global_steps = state.global_step

    def resume(self) -> None:
        pytest.fail("there is a state to go on from")

    def restart_workers(self) -> None:
        pass


@pytest.mark.parametrize(("arriving", "goes_on_after"), [({1, 2, 3}, 3), ({1, 2}, 2), ({1}, 1), (set(), 0)])
def test_a_lost_run_goes_on_from_the_newest_state_that_is_whole(arriving, goes_on_after, tmp_path):
    """The last one that is whole is kept beside a newer one; one that has not arrived by the next step is dropped."""
    ranks = Ranks(arriving)
    run = Steps(ranks)
    checkpoint = TrainerCheckpoint(CheckpointPlan(root=str(tmp_path)), run.trained_groups)
    settings = RecoveryConfig(snapshot_freq=1, backoff_s=0.0)
    recovery = Recovery(settings, run, checkpoint, PassLimits(may_cut=True), Termination())
    recovery.hold()
    for step in (1, 2, 3):
        run.global_steps = step
        recovery.hold()
        recovery.hold()  # once more for the same step: nothing
    assert recovery.can_save == bool(arriving)
    with recovery.guard():
        run.global_steps = 4  # under way
        raise ProcessLostError("a rank was killed")
    assert run.global_steps == goes_on_after
    assert ranks.restored == [goes_on_after] * (goes_on_after > 0)
    assert recovery.metrics()["recovery/redone_steps"] == 3 - goes_on_after
