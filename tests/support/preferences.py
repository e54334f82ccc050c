"""Preferences that follow from a rule, and small runs on them through the entry points that users call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny_run import write_jsonl
from verl.trainer.config.command_line import compose

LETTERS = "abcdefgh"


def preference_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Pairs of words; the better one has a vowel. Prompts and words have several lengths."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        word = [draw.choice("bcdfgh") for _ in range(draw.randint(2, 6))]
        better = list(word)
        better[draw.randrange(len(word))] = draw.choice("ae")
        draw.shuffle(word)
        prompt = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 4)))
        rows.append({"prompt": prompt, "chosen": "".join(better), "rejected": "".join(word)})
    return rows


def preference_run(run: Callable[[Any], None], name: str, folder: Path, model: str, log: Path) -> Callable[..., Any]:
    """A function that runs with changed settings and returns the metrics of every step.

    Args:
        run: ``run_rm`` or ``run_dpo``.
        name: of its configuration.
        folder: for data and checkpoints.
        model: folder of the model to start from.
        log: file that VERL_FILE_LOGGER_PATH names.
    """
    train = write_jsonl(folder / "pairs.jsonl", preference_rows(24))
    val = write_jsonl(folder / "held_out.jsonl", preference_rows(10, seed=1))

    def start(steps: int, save_to: str = "run", **changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings: dict[str, object] = {
            "data.train_files": train, "data.val_files": val, "data.train_batch_size": 8, "data.num_workers": 0,
            "data.max_length": 32, "data.use_dynamic_bsz": "false", "data.micro_batch_size_per_gpu": 8,
            "model.path": model, "engine.dtype": "float32", "optim.lr": 1e-3, "optim.lr_scheduler_type": "constant",
            "trainer.total_training_steps": steps, "trainer.save_freq": steps, "trainer.test_freq": steps,
            "trainer.controller": "local", "trainer.device": "cpu", "trainer.n_gpus_per_node": 1,
            "trainer.logger": "[file]", "trainer.default_local_dir": folder / save_to, "trainer.progress": "off",
            "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        }  # fmt: skip
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        run(compose([f"{key}={value}" for key, value in settings.items()], name))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    return start


def numbers_of(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that a run must reproduce: all but times, speeds and memory."""
    return {key: value for key, value in metrics.items() if not key.endswith(("time(s)", "mfu", "memory_used_gb"))}
