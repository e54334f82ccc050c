"""The recipes: the numbers of verl's own step where it can do the same, and a killed run that goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import Program, run
from tests.support.tiny_run import same
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
CLOCKS = ("timing", "perf/", "global_seqlen/")
STEPS = 3


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    run([FOLDER / "make_task.py", f"--output_dir={folder}"]).check_returncode()
    return folder


def settings(task: Path, folder: Path) -> list[str]:
    """Overrides of a run into ``folder``."""
    return [
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/val.parquet",
        "data.train_batch_size=4",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        f"trainer.test_freq={STEPS}",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[file]",
        f"hydra.run.dir={folder}/hydra",
    ]


def outcome(folder: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
    """The metrics of each step, and the states of the trained models after the last one."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = folder / f"global_step_{STEPS}"
    files = {str(path.relative_to(last)): torch.load(path, weights_only=True) for path in last.glob("*/*.pt")}
    return {record["step"]: record["data"] for record in records}, files


def assert_same(one: Path, other: Path) -> None:
    """The metrics that both have and the trained models, bit by bit."""
    (steps, files), (other_steps, other_files) = outcome(one), outcome(other)
    assert list(steps) == list(other_steps) == list(range(1, STEPS + 1))
    for step, metrics in steps.items():
        both = {name for name in metrics.keys() & other_steps[step].keys() if not name.startswith(CLOCKS)}
        assert {"critic/score/mean", "critic/advantages/max", "actor/pg_loss", "actor/grad_norm"} <= both
        assert {name: metrics[name] for name in both} == {name: other_steps[step][name] for name in both}
    assert any(name.startswith("actor/model") for name in files)
    assert same(files, other_files)


class Runs:
    """Runs of a recipe, each in a folder of its own."""

    def __init__(self, name: str, task: Path, folder: Path) -> None:
        self.name, self.task, self.folder = name, task, folder
        self.script = FOLDER / name / f"main_{name}.py"

    def environment(self, into: Path, **more: str) -> dict[str, str]:
        return {"VERL_FILE_LOGGER_PATH": str(into / "metrics.jsonl"), "PYTHONPATH": str(ROOT), **more}

    def straight(self, name: str = "straight", command: list[Any] | None = None, **environment: str) -> Path:
        """The folder of a run from the first step, or from what lies there, to the last; of the recipe's command."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        words = [*(command or [self.script]), *settings(self.task, folder)]
        done = run(words, ROOT, **self.environment(folder, **environment))
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    def by_own_step(self, **environment: str) -> Path:
        """The same settings with verl's own fit."""
        command = ["-m", "verl.trainer.main_ppo", f"--config-dir={FOLDER}/config", f"--config-name={self.name}"]
        return self.straight("own", [*command, "trainer.recovery.driver_restarts=0"], **environment)

    def killed(self) -> Path:
        """The recipe's command twice: the first is killed when a step is saved, the second goes on."""
        folder = self.folder / "killed"
        folder.mkdir()
        words = [self.script, *settings(self.task, folder)]
        first = Program(words, folder / "out", folder / "err", ROOT, **self.environment(folder))
        eventually((folder / "latest_checkpointed_iteration.txt").exists, "the first step is saved")
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL
        return self.straight("killed")


def test_dapo(task: Path, tmp_path: Path) -> None:
    """Its filter loop is algorithm.filter_groups of verl's own step, also when it is killed and goes on."""
    runs = Runs("dapo", task, tmp_path)
    killed = runs.killed()
    assert_same(killed, runs.by_own_step())
    steps, _ = outcome(killed)
    assert max(metrics["training/filter_groups/num_gen_batches"] for metrics in steps.values()) > 1
    assert "val-core/vowels/reward/mean@1" in steps[STEPS]


@pytest.mark.slow
def test_sppo(task: Path, tmp_path: Path) -> None:
    runs = Runs("sppo", task, tmp_path)
    own_step = runs.by_own_step(VERL_USE_EXTERNAL_MODULES="examples.recipes.sppo.sppo_algos")
    assert_same(runs.straight(), own_step)


@pytest.mark.slow
def test_prime(task: Path, tmp_path: Path) -> None:
    """verl's own step has no reward model that learns."""
    runs = Runs("prime", task, tmp_path)
    straight = runs.straight()
    assert_same(straight, runs.killed())
    steps, files = outcome(straight)
    assert steps[1]["prm/loss"] == pytest.approx(0.693147, abs=1e-6)  # ln 2: at first both models are the same
    assert steps[STEPS]["prm/loss"] < steps[1]["prm/loss"]
    assert {name.split("/")[0] for name in files} == {"actor", "prm"}


@pytest.mark.slow
def test_a_killed_sppo_goes_on(task: Path, tmp_path: Path) -> None:
    runs = Runs("sppo", task, tmp_path)
    assert_same(runs.straight(), runs.killed())


BY_HAND = """
import numpy as np
import torch
from types import SimpleNamespace
from examples.recipes.prime.prime_algos import compute_implicit_prm_loss, compute_prime_advantage
from examples.recipes.sppo.sppo_algos import compute_sppo_advantage, compute_sppo_loss

config = SimpleNamespace(global_batch_info={})
mask = torch.tensor([[1, 1], [1, 0]])
rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
index = np.array(["a", "a"])
log_prob = torch.tensor([[-1.0, -1.5], [-2.0, -9.0]])
old = torch.tensor([[-1.25, -1.5], [-1.5, -1.0]])

# The first beats the second and ties with itself: win rates (0.5 + 1) / 2 and (0.5 + 0) / 2, less a half.
targets, _ = compute_sppo_advantage(rewards, mask, index)
print(targets.tolist())
# Log-ratios 0.25 and -0.5: ((0.25 - 0.25)² + (-0.5 + 0.25)²) / 2 = 0.03125
print(compute_sppo_loss(old, log_prob, targets, mask, config=config)[0].item())
# Outcomes 1 and 0, logits 0.05 · 0.25 = 0.0125 and 0.05 · -0.5 = -0.025:
# (ln(1 + e^-0.0125) + ln(1 + e^-0.025)) / 2 = (0.686917 + 0.680725) / 2
outcomes = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
print(round(compute_implicit_prm_loss(old, log_prob, outcomes, mask, config=config)[0].item(), 5))
# Means per token: 0.3 and 0.1. Process: 0.2 - 0.1 and 0.4 - 0.1, returns 0.4 and 0.3; 0.1 - 0.3 = -0.2. Outcome: ±1.
process = torch.tensor([[0.2, 0.4], [0.1, 0.0]])
print([[round(v, 5) for v in row] for row in compute_prime_advantage(rewards, process, mask, index)[0].tolist()])
"""


def test_formulas_by_hand() -> None:
    done = run(["-c", BY_HAND], ROOT, PYTHONPATH=str(ROOT))
    found = done.stdout.splitlines()
    assert found == ["[[0.25, 0.25], [-0.25, -0.0]]", "0.03125", "0.68382", "[[1.4, 1.3], [-1.2, -0.0]]"], done.stderr
