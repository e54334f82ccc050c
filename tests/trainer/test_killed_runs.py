"""A run that is killed and started again ends as if nothing had happened: weights, metrics and samples, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import FORKS, as_started_by_hand
from tests.support.tiny_run import make_tiny_run, overrides, write_jsonl
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose

ROWS, STEPS = 12, 6
"""Two epochs of three steps: 12 rows in batches of 4."""
CLOCKS = ("timing", "perf/", "global_seqlen/", "train/time", "train/mfu", "train/cpu_memory")

TEACHER = "distillation.teacher_models.teacher_model.model_path"

PPO = {
    "trainer.save_freq": 1,
    "trainer.test_freq": 4,
    "trainer.total_training_steps": STEPS,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.shuffle": "true",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": PPO | {"actor_rollout_ref.actor.checkpoint.async_save": "true", "data.dataloader_num_workers": 2},
    "ppo": PPO | {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": "true",
                  "algorithm.kl_ctrl.type": "adaptive", "trainer.max_actor_ckpt_to_keep": 2,
                  "trainer.max_critic_ckpt_to_keep": 1, "trainer.val_before_train": "true",
                  "data.validation_shuffle": "true"},
    "lora": PPO | {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.rollout.name": "native",
                   "actor_rollout_ref.actor.use_kl_loss": "true"},
    "teacher": PPO | {"distillation.enabled": "true", "distillation.distillation_loss.loss_mode": "jsd_topk",
                      "distillation.distillation_loss.topk": 8},
    "average": PPO | {"distillation.enabled": "true", "distillation.self_distillation.enabled": "true",
                      "distillation.self_distillation.weights": "ema", "data.return_raw_chat": "true",
                      "distillation.self_distillation.ema_decay": 0.5},
    "sft": {},
}  # fmt: skip


def main(algorithm: str, arguments: list[str], environment: dict[str, str]) -> None:
    """One process of a run."""
    as_started_by_hand(environment)
    if algorithm == "sft":
        from verl.trainer.sft_trainer import run_sft

        run_sft(compose(arguments, "sft_trainer"))
    else:
        from verl.trainer.main_ppo import run_ppo

        run_ppo(compose(arguments))


class Runs:
    """Runs of one algorithm over the same model and data."""

    def __init__(self, algorithm: str, folder: Path) -> None:
        self.algorithm = algorithm
        self.folder = folder
        if algorithm == "sft":
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"say {i}"},
                        {"role": "assistant", "content": "7" * (1 + i % 5)},
                    ]
                }
                for i in range(ROWS)
            ]
            files, model = write_jsonl(folder / "sft.jsonl", rows), tiny_model_dir(folder / "model")
            settings = {
                "data.train_files": files, "data.val_files": files, "data.train_batch_size": 4, "data.num_workers": 0,
                "data.max_length": 32, "model.path": model, "engine.dtype": "float32", "optim.lr": 1e-2,
                "trainer.total_training_steps": STEPS, "trainer.save_freq": 1, "trainer.test_freq": 4,
                "trainer.controller": "local", "trainer.device": "cpu", "trainer.logger": "[file]",
                "trainer.progress": "off", "trainer.max_ckpt_to_keep": 2,
            }  # fmt: skip
            self.arguments = [f"{key}={value}" for key, value in settings.items()]
        else:
            paths = make_tiny_run(folder, prompts=ROWS)
            # A random policy never solves countdown: a reward that it can earn makes gradients.
            (folder / "reward.py").write_text(
                "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"
            )
            settings = SETTINGS[algorithm] | {"custom_reward_function.path": folder / "reward.py"}
            if algorithm == "teacher":
                settings[TEACHER] = tiny_model_dir(folder / "teacher", seed=7)
            if algorithm == "average":
                (folder / "template.jinja").write_text("{{prompt}}={{reward_model.ground_truth.target}}")
                settings["distillation.self_distillation.template_path"] = folder / "template.jinja"
            self.arguments = overrides(paths, folder, **{key.replace(".", "__"): v for key, v in settings.items()})

    def start(self, name: str) -> Any:
        """A process that runs, or goes on with, the run called ``name``."""
        root = self.folder / name
        root.mkdir(exist_ok=True)
        arguments = [*self.arguments, f"trainer.default_local_dir={root}/checkpoints"]
        if self.algorithm != "sft":
            arguments += [f"trainer.{kind}_data_dir={root}/{kind}" for kind in ("rollout", "validation")]
        environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(root / "metrics.jsonl")}
        process = FORKS.Process(target=main, args=(self.algorithm, arguments, environment))
        process.start()
        return process

    def finish(self, name: str) -> None:
        process = self.start(name)
        process.join()
        assert process.exitcode == 0

    def kill_after(self, name: str, step: int, delay_s: float) -> None:
        """Start it, and kill it soon after it has reported ``step``: while it is committed, or in the next one.

        Not before there is any checkpoint: such a run starts anew, and writes its log behind what is there. One that
        came to its end while this process was held up is made again.
        """
        for _ in range(5):
            if self._is_killed_after(name, step, delay_s):
                return
            shutil.rmtree(self.folder / name)
        pytest.fail("five runs ended before they could be killed")

    def _is_killed_after(self, name: str, step: int, delay_s: float) -> bool:
        log = self.folder / name / "metrics.jsonl"
        first = self.folder / name / "checkpoints" / "latest_checkpointed_iteration.txt"
        process = self.start(name)
        while process.is_alive() and (reported(log) < step or not first.exists()):
            time.sleep(0.002)
        time.sleep(delay_s)
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0), f"it ended with {process.exitcode} before step {step}"
        return process.exitcode != 0

    def result(self, name: str) -> dict[str, Any]:
        """All that a run leaves, without its times, and without the validation that it begins with."""
        root = self.folder / name
        found: dict[str, Any] = {}
        for path in sorted(root.rglob("*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            if path.name.endswith((".run.jsonl", ".ranks.jsonl")):  # of times
                continue
            if path.parent.name == "validation" and path.stem not in ("4", str(STEPS)):
                continue
            for record in records:
                record.pop("run", None)
                record.pop("time", None)
                if "data" in record:
                    record["data"] = {k: v for k, v in record["data"].items() if not k.startswith(CLOCKS)}
            records = [record for record in records if "training/epoch" in record.get("data", {"training/epoch": 0})]
            # As text: two NaNs are the same there.
            found[str(path.relative_to(root))] = [json.dumps(record) for record in records]
        last = root / "checkpoints" / f"global_step_{STEPS}"
        for path in sorted(last.rglob("*.pt")):
            found[str(path.relative_to(last))] = flat(torch.load(path, weights_only=True))
        return found


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Nested state by dotted name; tensors as lists of their numbers."""
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flat(value, f"{name}.{key}").items()}
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


def reported(log: Path) -> int:
    lines = log.read_bytes().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        assert found[part] == value, part


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Runs, dict[str, Any]]]:
    """For each algorithm its runs, and what the undisturbed one leaves."""
    known: dict[str, tuple[Runs, dict[str, Any]]] = {}

    def get(algorithm: str) -> tuple[Runs, dict[str, Any]]:
        if algorithm not in known:
            made = Runs(algorithm, tmp_path_factory.mktemp(algorithm))
            made.finish("straight")
            known[algorithm] = made, made.result("straight")
        return known[algorithm]

    return get


def each_step(fast: dict[str, int]) -> list[Any]:
    """Every algorithm killed after every step; in the fast suite only after one step, or none (0)."""
    return [
        pytest.param(name, step, marks=[] if step == fast[name] else [pytest.mark.slow])
        for name in fast
        for step in range(1, STEPS)
    ]


# `make chaos` kills PPO runs on two ranks.
@pytest.mark.parametrize(
    "algorithm, step",
    [
        *each_step({"grpo": 2, "ppo": 0, "lora": 0, "teacher": 0, "sft": 4}),
        pytest.param("average", 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(runs, algorithm, step):
    made, straight = runs(algorithm)
    made.kill_after(f"killed_{step}", step, delay_s=0.004 * step)
    made.finish(f"killed_{step}")
    assert_same(made.result(f"killed_{step}"), straight)
