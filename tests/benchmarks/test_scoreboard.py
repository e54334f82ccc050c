"""The scoreboard computes what its tables say, asks every framework for the same, and its settings are valid."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scoreboard import agreement, results
from benchmarks.scoreboard.measure import Measurement, measure
from benchmarks.scoreboard.results import Outcome, Result, cell, table
from benchmarks.scoreboard.rewards import compute_score
from benchmarks.scoreboard.run import Run, read_run
from benchmarks.scoreboard.tasks import TASKS, answers_without
from benchmarks.scoreboard.verl_command import verl_command
from verl.scorers.countdown import compute_score as verl_countdown
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.config.generate import ENTRIES
from verl.trainer.config.load import load_config

TRUTH = {"target": 16, "numbers": [7, 12, 3]}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer> 7 + 12 - 3 </answer>", 1.0),
        ("<answer>12-3+7</answer>", 1.0),
        ("<answer>1</answer> <answer>7 - 3 + 12</answer>", 1.0),
        ("<answer>7 + 12 + 3</answer>", 0.0),
        ("<answer>16</answer>", 0.0),
        ("<answer>7 + 12 - 3 -</answer>", 0.0),
        ("7 + 12 - 3", 0.0),
    ],
)
def test_the_reward_is_that_of_the_quickstart(text, score):
    assert compute_score("countdown", text, TRUTH) == verl_countdown(text, TRUTH) == score


def test_a_rejected_answer_misses_the_target():
    right = ["7 + 12 - 3", "7 - 3 + 12", "12 + 7 - 3", "12 - 3 + 7"]
    texts = {answers_without(right, TRUTH["numbers"], random.Random(seed)) for seed in range(20)}
    assert len(texts) > 5
    assert {compute_score("countdown", f"<answer>{text}</answer>", TRUTH) for text in texts} == {0.0}


def make_run(folder: Path, name: str) -> Run:
    rows = folder / "rows.jsonl"
    rows.write_text("")
    model = folder / "model"
    if not model.exists():
        tiny_model_dir(model, family="qwen3")
    paths = {"model": str(model), "rows": str(rows), "validation": str(rows), "output": str(folder)}
    settings: dict[str, Any] = paths | TASKS[name].settings
    return Run(seed=1, **settings)


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_settings_of_every_method_are_valid_and_say_the_same_as_the_run(name, tmp_path):
    run = make_run(tmp_path, name)
    run.write(tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run

    module, *settings = verl_command(run)[2:]
    (entry,) = [entry for entry in ENTRIES if f"verl.trainer.{entry.module}" == module]
    config: Any = load_config(compose(settings, entry.name), entry.root)

    assert config.trainer.total_training_steps == run.steps
    optimizer = config.actor_rollout_ref.actor.optim if run.method == "grpo" else config.optim
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.weight_decay) == (run.learning_rate, "constant", 0.01)
    if run.method == "grpo":
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert (rollout.n, rollout.temperature, rollout.top_p, rollout.top_k) == (run.responses, 1.0, 1.0, -1)
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 3.0)
        assert (actor.loss_agg_mode, actor.use_kl_loss, actor.entropy_coeff) == ("token-mean", False, 0)
        assert run.update_size == actor.ppo_mini_batch_size * run.responses


def outcome(run: Run, scores: list[float], start: float, interval: float) -> Outcome:
    curve = [(start + interval * (index + 1), score) for index, score in enumerate(scores)]
    return Outcome(run, Measurement(20.0, 30.0, 2**30, []), 0.5, curve)


def test_the_table_has_means_and_ranges(tmp_path):
    run = make_run(tmp_path, "grpo")
    # three batches reach 0.2 on average at the third, (0.1 + 0.2 + 0.3) / 3: 4 + 3·2 s, and 6 + 3·2 s
    first, second = (outcome(run, [0.1, 0.2, 0.3, 0.4], start, 2.0) for start in (4.0, 6.0))
    assert (first.step_seconds, first.startup_seconds, first.seconds_to(0.2)) == (2.0, 4.0, 10.0)
    assert first.seconds_to(0.31) is None
    result = Result(TASKS["grpo"], {"verl": [first, second]}, [agreement.Agreement("loss", 1e-6)])
    assert table(result).splitlines() == [
        "| | seconds | seconds to a score of 0.2 | start-up, s | a batch, s | processor seconds | peak memory, MiB "
        "| held-out accuracy, % |",
        "|---|---|---|---|---|---|---|---|",
        "| verl | 20 (20–20) | 11 (10–12) | 5.0 (4.0–6.0) | 2.00 (2.00–2.00) | 30 (30–30) | 1024 (1024–1024) "
        "| 50.0 (50.0–50.0) |",
        "",
        "- loss: 1e-06",
    ]
    assert cell([3.0, None], ".0f") == "1 of 2 runs reached it"


def test_the_largest_difference_of_each_kind_is_kept():
    pair = {"verl": [1.0, 2.0], "TRL": [1.0, 2.5]}
    assert [each.difference for each in agreement.compare_losses(pair)] == [0.0, 0.5]
    kinds = [agreement.Agreement("a", 1.0), agreement.Agreement("b", 3.0), agreement.Agreement("a", 2.0)]
    assert results.largest(kinds) == [agreement.Agreement("a", 2.0), agreement.Agreement("b", 3.0)]


PROGRAM = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "held = bytes(range(250)) * 400_000; input()"], stdin=subprocess.PIPE)
time.sleep(0.6)
child.communicate(b"\\n")
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    file.write(json.dumps({"step": 1, "time": time.time(), "data": {"loss": 2.0}}) + "\\n")
"""


def test_children_count_for_memory(tmp_path):
    done = measure([sys.executable, "-c", PROGRAM], tmp_path / "metrics.jsonl", tmp_path / "log.txt")
    assert done.peak_bytes > 100e6
    assert [data for _, data in done.steps] == [{"loss": 2.0}]
    with pytest.raises(SystemExit, match="failed with exit status 3"):
        measure([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "metrics.jsonl", tmp_path / "log.txt")
