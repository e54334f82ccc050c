"""What is trained: data, a model to begin with, sizes; all made here, by the programs of the quickstarts."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.scoreboard.run import Run, write_rows
from benchmarks.shape import ROOT
from examples.quickstart import settings as quickstart
from examples.quickstart.make_task import answers
from examples.quickstart.quickstart import exported_model, run_stage
from examples.quickstart_real.make_task import make_splits


class Material:
    """Models and data below one folder; each is made when it is first asked for, and kept."""

    def __init__(self, folder: Path, smollm2: Path | None) -> None:
        self.folder = folder
        self._smollm2 = smollm2

    @property
    def countdown(self) -> Path:
        """The quickstart's task: parquet files, and a model with random weights."""
        task = self.folder / "countdown"
        self._make(task, "examples/quickstart/make_task.py", f"--output_dir={task}")
        return task

    @property
    def warmed_up(self) -> Path:
        """The quickstart's model after its supervised warm-up."""
        output = self.folder / "warm_up"
        if not output.exists():
            output.mkdir()
            warm_up = quickstart.command("verl.trainer.sft_trainer", quickstart.sft_settings(self.countdown, output, 1))
            run_stage("Supervised warm-up", warm_up, output / "log.txt", output / "metrics.jsonl")
        return exported_model(output / "checkpoints")

    @property
    def smollm2(self) -> Path:
        """SmolLM2-135M-Instruct."""
        if self._smollm2 is not None:
            return self._smollm2
        model = self.folder / "smollm2"
        self._make(model, "examples/data_preprocess/smollm2.py", f"--local_save_dir={model}")
        return model

    def _make(self, folder: Path, program: str, argument: str) -> None:
        if not folder.exists():
            subprocess.run([sys.executable, ROOT / program, argument], check=True, cwd=ROOT)


def countdown_prompts(material: Material, split: str) -> list[dict]:
    """The quickstart's prompts."""
    return pq.read_table(material.countdown / f"rl_{split}.parquet").to_pylist()


def countdown_conversations(material: Material) -> list[dict]:
    """The quickstart's demonstrations."""
    return pq.read_table(material.countdown / "sft_train.parquet").to_pylist()


def countdown_pairs(material: Material) -> list[dict]:
    """A right answer to each prompt, and one with the same numbers that misses the target."""
    rng, pairs = random.Random(1), []
    for row in countdown_prompts(material, "train"):
        truth = row["reward_model"]["ground_truth"]
        right = answers((tuple(truth["numbers"]), truth["target"]))
        wrong = answers_without(right, truth["numbers"], rng)
        sides = {"chosen": rng.choice(right), "rejected": wrong}
        messages = {
            side: [{"role": "assistant", "content": f"<answer>{text}</answer>"}] for side, text in sides.items()
        }
        pairs.append({"prompt": row["prompt"], **messages})
    return pairs


def answers_without(right: list[str], numbers: list[int], rng: random.Random) -> str:
    """An expression of all numbers that is none of the right ones."""
    while True:
        first, *rest = rng.sample(numbers, len(numbers))
        text = f"{first}" + "".join(f" {rng.choice('+-')} {number}" for number in rest)
        if text not in right:
            return text


def sums_prompts(material: Material, split: str) -> list[dict]:
    """The sums of the quickstart with a pretrained model."""
    return list(make_splits(1, 30, 100)[split])


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run by every framework."""

    name: str
    title: str
    model: Callable[[Material], Path]
    rows: Callable[[Material], list[dict]]
    validation: Callable[[Material], list[dict]]
    seeds: int
    target: float | None = None
    """Mean score of three batches; the time until it is reached is reported."""
    settings: dict[str, Any]

    @property
    def is_sampled(self) -> bool:
        """True if the model's own responses are scored."""
        return self.settings["method"] == "grpo"

    def run(self, material: Material, output: Path, seed: int, steps: int | None) -> Run:
        """Write the rows, shuffled by the seed, and name all settings."""
        folder = material.folder / "rows"
        folder.mkdir(exist_ok=True)
        paths = {name: folder / f"{self.name}-{name}-{seed}.jsonl" for name in ("train", "test")}
        rows = self.rows(material)
        random.Random(seed).shuffle(rows)
        settings = self.settings | ({"steps": steps} if steps else {})
        write_rows(rows[: settings["steps"] * settings["batch_size"]], paths["train"])
        write_rows(self.validation(material), paths["test"])
        return Run(
            model=str(self.model(material)),
            rows=str(paths["train"]),
            validation=str(paths["test"]),
            output=str(output),
            seed=seed,
            **settings,
        )


COUNTDOWN: dict[str, Any] = {"prompt_length": quickstart.PROMPT_LENGTH, "response_length": quickstart.RESPONSE_LENGTH}
TASKS = {
    task.name: task
    for task in (
        Task(
            name="sft",
            title="Supervised training on the quickstart's demonstrations, from random weights",
            model=lambda material: material.countdown / "model",
            rows=countdown_conversations,
            validation=lambda material: countdown_prompts(material, "test"),
            seeds=3,
            settings=COUNTDOWN | {"method": "sft", "steps": 100, "batch_size": 128, "learning_rate": 1e-3},
        ),
        Task(
            name="dpo",
            title="DPO on right and wrong answers, from the quickstart's warm-up",
            model=lambda material: material.warmed_up,
            rows=countdown_pairs,
            validation=lambda material: countdown_prompts(material, "test"),
            seeds=3,
            settings=COUNTDOWN | {"method": "dpo", "steps": 30, "batch_size": 64, "learning_rate": 5e-5},
        ),
        Task(
            name="grpo",
            title="GRPO on the quickstart's task, from its warm-up",
            model=lambda material: material.warmed_up,
            rows=lambda material: countdown_prompts(material, "train"),
            validation=lambda material: countdown_prompts(material, "test"),
            seeds=3,
            target=0.2,
            settings=COUNTDOWN
            | {
                "method": "grpo",
                "steps": 24,
                "batch_size": 128,
                "responses": 8,
                "updates": 4,
                "learning_rate": 2e-4,
            },
        ),
        Task(
            name="smollm2",
            title="GRPO of SmolLM2-135M-Instruct on sums",
            model=lambda material: material.smollm2,
            rows=lambda material: sums_prompts(material, "train"),
            validation=lambda material: sums_prompts(material, "test"),
            seeds=1,
            settings={
                "method": "grpo",
                "steps": 2,
                "batch_size": 8,
                "responses": 8,
                "learning_rate": 1e-5,
                "prompt_length": 64,
                "response_length": 12,
                "micro_batch": 8,
                "micro_batch_tokens": 512,
            },
        ),
    )
}
