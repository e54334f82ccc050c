"""Means over seeds, best values and CSV, by hand."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from verl.plugins.view.comparison import Best, best_of, csv_of, curves_of, experiment_of, mean_curve
from verl.plugins.view.curves import Curve
from verl.plugins.view.index import Index
from verl.plugins.view.runs import MAIN_METRICS, Library, main_metrics


def curve(points: dict[int, float]) -> Curve:
    return Curve(np.array(list(points), float), np.full(len(points), np.nan), np.array(list(points.values())))


def library(folder: Path, runs: dict[str, tuple[dict[str, Any], list[dict]]]) -> Library:
    for name, (config, lines) in runs.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{name}.run.jsonl").write_text(json.dumps({"event": "start", "config": config, "time": 1}) + "\n")
    made = Library([folder], Index(folder / ".verl_view/index.sqlite"))
    made.find()
    made.refresh()
    return made


def test_a_mean_is_over_the_steps_that_all_have_and_of_a_repeated_step_the_later_counts():
    resumed = Curve(np.array([1.0, 2, 2, 3]), np.full(4, np.nan), np.array([1.0, 9, 2, 6]))
    mean = mean_curve([resumed, curve({2: 4.0, 3: 0.0, 4: 100.0}), curve({3: 3.0, 2: 3.0})])
    assert mean.steps.tolist() == [2, 3]
    assert mean.values.tolist() == [3, 3]  # (2 + 4 + 3) / 3 and (6 + 0 + 3) / 3
    assert (np.array([mean.low, mean.high]).tolist(), mean.runs) == ([[2, 0], [4, 6]], 3)
    assert len(mean_curve([curve({1: 1.0}), curve({2: 1.0})]).steps) == 0
    assert best_of(mean_curve([curve({1: 1.0}), curve({2: 1.0})])) is None


def test_best_values_are_finite_and_have_their_steps():
    found = best_of(curve({1: 0.5, 2: math.inf, 3: -1.0, 4: 2.0, 5: 1.5, 6: math.nan}))
    assert found == Best(lowest=(3, -1.0), highest=(4, 2.0), last=(5, 1.5), runs=1)
    assert best_of(curve({1: math.nan})) is None


def test_runs_that_differ_in_seeds_and_names_alone_are_one_experiment(tmp_path):
    def config(seed: int, lr: float, **trainer: Any) -> dict[str, Any]:
        return {"data": {"seed": seed}, "actor": {"lr": lr, "data_loader_seed": seed}, "trainer": trainer}

    one = [{"step": 1, "data": {"x": 1.0}}, {"step": 2, "data": {"x": 2.0, "y": 5.0}}]
    two = [{"step": 1, "data": {"x": 3.0}}]
    made = library(
        tmp_path,
        {
            "a": (config(1, 0.1, experiment_name="a", default_local_dir="/a"), one),
            "b": (config(2, 0.1, experiment_name="b", default_local_dir="/b"), two),
            "c": (config(1, 0.2, experiment_name="a", default_local_dir="/a"), one),
            "d": ({}, one),
            "e": ({}, two),
        },
    )
    runs = {run.files.name: run for run in made.runs.values()}
    keys = {name: experiment_of(run) for name, run in runs.items()}
    assert keys["a"] == keys["b"]
    assert len(set(keys.values())) == 4, "runs without recorded settings are each alone"
    curves = curves_of([runs["a"], runs["b"], runs["c"]], ["x", "y"], made.index, averages=True)
    assert {key: list(own) for key, own in curves.items()} == {keys["a"]: ["x", "y"], keys["c"]: ["x", "y"]}
    assert (curves[keys["a"]]["x"].values.tolist(), curves[keys["a"]]["x"].runs) == ([2.0], 2)  # (1 + 3) / 2
    assert (curves[keys["a"]]["y"].values.tolist(), curves[keys["a"]]["y"].runs) == ([5.0], 1)


def test_csv_has_a_line_per_run_and_step(tmp_path):
    lines = [
        {"step": 1, "time": 10.5, "data": {"x": 1.0, "y": None}},
        {"step": 2, "time": 11.5, "data": {"x": 2.0}},
        {"step": 2, "time": 13.5, "data": {"x": 4.0}},
    ]
    made = library(tmp_path, {"a, b": ({}, lines), "c": ({}, [{"step": 7, "data": {"y": 0.25}}])})
    rows = list(csv.reader("".join(csv_of(list(made.runs.values()), ["x", "y"], made.index)).splitlines()))
    assert rows == [
        ["run", "step", "time", "x", "y"],
        ["a, b", "1", "10.5", "1.0", "nan"],
        ["a, b", "2", "13.5", "4.0", ""],
        ["c", "7", "", "", "0.25"],
    ]


def test_the_first_metrics_are_reward_validation_length_entropy_kl_gradient_loss_and_time():
    names = [
        "timing_s/step", "actor/grad_norm", "actor/entropy_loss", "val-core/b/mean@1", "critic/score/mean",
        "critic/advantages/mean", "actor/pg_loss", "val-core/a/mean@1", "actor/kl_loss", "actor/entropy",
        "response_length/mean",
    ]  # fmt: skip
    assert main_metrics(names) == [
        "critic/score/mean", "val-core/a/mean@1", "val-core/b/mean@1", "response_length/mean", "actor/entropy",
        "actor/kl_loss", "actor/grad_norm", "actor/pg_loss", "timing_s/step",
    ]  # fmt: skip
    assert len(set(MAIN_METRICS)) == len(MAIN_METRICS)
