"""How many of our own functions a reader passes from the command line to the policy loss."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import verl
from tests.support.tiny_run import make_tiny_run, overrides
from verl.workers.losses import PolicyLoss

AT_MOST = 15
ROOT = Path(verl.__file__).parent


def own_frames() -> list[str]:
    """The functions below ``verl/`` on the stack, the outermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if (path := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
            found.append(f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("prompts_per_optimizer_step", [2, 4])
def test_from_the_command_to_the_policy_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts_per_optimizer_step: int
) -> None:
    """With several optimizer steps in a batch, and with one, whose own forward pass gives old_log_probs."""
    chains: list[list[str]] = []
    call = PolicyLoss.__call__

    def spy(self: PolicyLoss, *args: Any) -> Any:
        chains.append([*own_frames(), "workers/losses.py PolicyLoss.__call__"])
        return call(self, *args)

    monkeypatch.setattr(PolicyLoss, "__call__", spy)
    changes = {
        "trainer__total_training_steps": 1,
        "trainer__recovery__driver_restarts": 0,
        "actor_rollout_ref__actor__ppo_mini_batch_size": prompts_per_optimizer_step,
        "hydra__run__dir": tmp_path / "hydra",
    }
    monkeypatch.setattr(sys, "argv", ["main_ppo", *overrides(make_tiny_run(tmp_path), tmp_path, **changes)])
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
    print("\n".join(f"{number} {place}" for number, place in enumerate(chains[0], 1)))
    assert len(chains[0]) <= AT_MOST
