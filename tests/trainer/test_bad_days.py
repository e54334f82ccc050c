"""Runs with bad data, rewards or machines.

A reward that is not finite fails its sample; a KL that is not finite is ignored by the controllers of KL and entropy,
and its metric is NaN. If all rewards are equal, advantages and gradient are 0; if all samples failed, nothing is
learned and the controllers do not change. Durations and the order of files do not depend on the clock of the machine.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from pathlib import Path

import pytest

from tests.forks import Program, run
from tests.support.tiny_run import make_tiny_run, overrides
from verl.base.import_utils import prepare_process
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref__actor"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with a reward function and changed settings; the metrics of every step."""
    paths, log = make_tiny_run(tmp_path), tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(reward: str = "len(solution_str) % 3 / 2", **changes: object) -> dict[int, dict[str, float]]:
        (tmp_path / "reward.py").write_text(
            f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {reward}\n"
        )
        settings = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__total_training_steps": 1}
        log.unlink(missing_ok=True)
        run_ppo(compose(overrides(paths, tmp_path, **settings | changes)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


def not_finite(metrics: dict[str, float]) -> list[str]:
    return [name for name, value in metrics.items() if value is None or not math.isfinite(value)]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_equal_rewards_teach_nothing_and_harm_nothing(train, estimator):
    metrics = train("0.25", algorithm__adv_estimator=estimator)[1]
    assert metrics["critic/advantages/zero_ratio"] == 1
    assert metrics["actor/grad_norm"] == 0
    assert metrics["actor/skipped_steps"] == 0
    assert not_finite(metrics) == []


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_a_batch_of_one_sequence(train, estimator):
    sizes = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu")
    one = {f"{section}__{size}": 1 for section in (ACTOR, "critic") for size in sizes} | {"data__train_batch_size": 1}
    metrics = train(
        "0.25",
        algorithm__adv_estimator=estimator,
        actor_rollout_ref__rollout__n=1,
        data__max_response_length=1,  # of one token, at that
        **one,
    )[1]
    assert metrics["response_length/max"] == 1
    assert metrics["actor/skipped_steps"] == 0
    # One token has no variance, so there is nothing to correlate or to explain.
    needs_two = ["training/rollout_actor_probs_pearson_corr", *["critic/vf_explained_var"] * (estimator == "gae")]
    assert sorted(not_finite(metrics)) == sorted(needs_two)


HUNGRY = '''
import os
import torch
from verl.algorithms import get_policy_loss_fn, register_policy_loss

@register_policy_loss("hungry")
def hungry(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **_):
    """The usual loss on a machine with room for two sequences, if this is the rank of which the test says so."""
    if len(response_mask) > 2 and os.environ.get("RANK", "0") == os.environ.get("HUNGRY_RANK", "none"):
        torch.empty(2**50, dtype=torch.uint8)
    rest = {"loss_agg_mode": loss_agg_mode, "config": config, "rollout_is_weights": None}
    return get_policy_loss_fn("vanilla")(old_log_prob, log_prob, advantages, response_mask, **rest)
'''


@pytest.fixture
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings of a run with that loss."""
    (tmp_path / "hungry_loss.py").write_text(HUNGRY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "hungry_loss")
    prepare_process()
    return {f"{ACTOR}__policy_loss__loss_mode": "hungry", "trainer__total_training_steps": 2}


def losses(steps: dict[int, dict[str, float]]) -> list[list[float]]:
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")
    return [[metrics[name] for name in names] for metrics in steps.values()]


def assert_undisturbed(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> None:
    for some, others in zip(losses(found), losses(expected), strict=True):
        assert some == pytest.approx(others, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_smaller_passes(train, hungry, monkeypatch, tmp_path):
    monkeypatch.setenv("HUNGRY_RANK", "0")
    steps = train(**hungry)
    assert [steps[n]["recovery/micro_batch_splits"] for n in (1, 2)] == [1, 1]  # 4 sequences, then 2, for the whole run
    monkeypatch.delenv("HUNGRY_RANK")
    undisturbed = train(**hungry)
    assert_undisturbed(steps, undisturbed)
    assert "recovery/micro_batch_splits" not in undisturbed[1]


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_started_again_with_them_and_smaller_passes(train, hungry, tmp_path):
    undisturbed = train(**hungry)
    arguments = overrides(
        make_tiny_run(tmp_path),
        tmp_path,
        **hungry,
        custom_reward_function__path=tmp_path / "reward.py",
        trainer__controller="ray",
        trainer__n_gpus_per_node=2,
        trainer__recovery__backoff_s=0,
        ray_kwargs__ray_init__num_cpus=2,
    )
    log = tmp_path / "ray.jsonl"
    places = f"{ROOT}{os.pathsep}{tmp_path}"
    environment = {"HUNGRY_RANK": "1", "VERL_FILE_LOGGER_PATH": str(log), "PYTHONPATH": places}
    done = run(["-m", "verl.trainer.main_ppo", *arguments], tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    records = {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}
    assert_undisturbed(records, undisturbed)
    assert [records[n]["recovery/micro_batch_splits"] for n in (1, 2)] == [1, 1]
    assert [records[n]["recovery/restarts"] for n in (1, 2)] == [1, 1]
    assert "Other ranks wait for this one" in done.stdout + done.stderr


def test_full_disks_behind_logs_samples_and_output_do_not_end_a_run(tmp_path):
    for dump in ("rollouts/1.jsonl", "validation/0.jsonl"):
        (tmp_path / dump).mkdir(parents=True)  # a folder where the file should be
    arguments = overrides(
        make_tiny_run(tmp_path),
        tmp_path,
        trainer__total_training_steps=1,
        trainer__logger="[console,file]",
        trainer__rollout_data_dir=tmp_path / "rollouts",
        trainer__validation_data_dir=tmp_path / "validation",
        trainer__val_before_train="true",
    )
    full, errors = Path("/dev/full"), tmp_path / "errors.txt"
    process = Program(
        ["-m", "verl.trainer.main_ppo", *arguments], full, errors, tmp_path, VERL_FILE_LOGGER_PATH=str(full)
    )
    code = process.wait(timeout=120)
    said = errors.read_text() + next((tmp_path / "outputs").rglob("main_ppo.log")).read_text()
    assert code == 0, said
    assert "standard output cannot be written" in said
    assert "samples cannot be written" in said
    assert re.search(r"tracker 'file' failed in 3 of \d+ calls", said)


def test_a_clock_that_jumps_during_a_step_changes_no_duration(train, monkeypatch):
    days = itertools.cycle([0, -86_400, 86_400, 3 * 86_400])
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + next(days))
    metrics = train()[1]
    seconds = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    assert len(seconds) > 5
    assert all(0 <= value < 3600 for value in seconds.values())
    assert metrics["perf/throughput"] > 0


def test_no_duration_is_taken_from_the_clock_on_the_wall():
    # Which of several machines failed first, and since when a lock is held: words for people, nothing is decided by it.
    # An instance of a cloud ends at a time of day, answers of a model and spans of a trace have a date.
    allowed = {
        "verl/plugins/endpoint/chat.py",
        "verl/plugins/endpoint/completions.py",
        "verl/plugins/endpoint/responses.py",
        "verl/agents/policy.py",  # spans
        "verl/agents/tool_agent.py",
        "verl/agents/tool_calls.py",
        "verl/plugins/verifiers/environment.py",
        "verl/single_controller/base/decorator.py",
        "verl/supervision/lock.py",
        "verl/compat/toolkit/checkpoints.py",
        "verl/tracking/prometheus.py",  # when the last step ended
        "verl/plugins/serve/files.py",  # when a state was saved
        "verl/utils/run_log.py",  # once, for the date of what a monotonic clock counts on
    }
    wall = re.compile(r"\btime\.time\(|\bdatetime\.(now|utcnow|today)\(|from time import .*\btime\b")
    found = {
        str(path.relative_to(ROOT)) for path in (ROOT / "verl").rglob("*.py") if wall.search(path.read_text("utf-8"))
    }
    assert found <= allowed
