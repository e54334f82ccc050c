"""Runs whose updates are skipped: counted, saved for inspection, and stopped after ``recovery.max_bad_steps`` in a row.

The first 3 batches of a sequence are saved in ``recovery.bad_batch_dir``, 12 files at most; ``meta_info`` has the
reasons.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.algorithms import get_policy_loss_fn, register_policy_loss
from verl.errors import NonFiniteError
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.recovery import SAVED_BATCHES, BadSteps
from verl.workers.engine.non_finite import NonFinite, in_batch_order

BAD_UPDATES: set[int] = set()
"""Optimizer steps in which the loss below is NaN; two belong to each step of a run."""

_calls = 0


@register_policy_loss("nan_at_times")
def nan_at_times(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **_):
    """The usual loss, with a NaN where the test wants it."""
    global _calls
    _calls += 1
    rest = {"loss_agg_mode": loss_agg_mode, "config": config, "rollout_is_weights": None}
    loss, metrics = get_policy_loss_fn("vanilla")(old_log_prob, log_prob, advantages, response_mask, **rest)
    return (loss * math.nan if _calls in BAD_UPDATES else loss), metrics


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with NaN in the given optimizer steps; the metrics of every step."""
    global _calls
    paths, log = make_tiny_run(tmp_path), tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    _calls = 0

    def run(bad: set[int], **changes: object) -> dict[int, dict[str, float]]:
        BAD_UPDATES.clear()
        BAD_UPDATES.update(bad)
        settings = {
            "actor_rollout_ref__actor__policy_loss__loss_mode": "nan_at_times",
            "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 8,
            "custom_reward_function__path": tmp_path / "reward.py",
        } | changes
        (tmp_path / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return sum(map(ord, solution_str)) % 7 / 7\n"
        )
        try:
            run_ppo(compose(overrides(paths, tmp_path, **settings)))
        finally:
            steps.update({r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())})
        return steps

    steps: dict[int, dict[str, float]] = {}
    run.steps = steps
    return run


def test_a_bad_step_is_counted_and_its_batch_kept(train, tmp_path):
    steps = train({4}, trainer__total_training_steps=3)  # the second optimizer step of step 2
    assert [steps[n]["actor/skipped_steps"] for n in (1, 2, 3)] == [0, 1, 0]
    assert [steps[n]["recovery/bad_steps"] for n in (1, 2, 3)] == [0, 1, 1]
    (kept,) = (tmp_path / "checkpoints" / "bad_batches").iterdir()
    assert kept.name == "step_2_update_actor.dataproto"
    batch = DataProto.load_from_disk(kept)
    assert len(batch) == 16
    assert batch.meta_info["non_finite"] == [
        f"the term 'actor/{name}' of the loss is nan" for name in ("pg_loss", "loss")
    ]
    assert batch.non_tensor_batch["uid"][0] == "2-0"


def test_bad_steps_in_a_row_stop_the_run(train, tmp_path):
    bad = set(range(3, 100)) - {5, 6}  # steps 2, 4, 5 and on: step 3 is a good one between
    with pytest.raises(NonFiniteError) as error:
        train(
            bad,
            trainer__total_training_steps=9,
            trainer__recovery__max_bad_steps=2,
            trainer__recovery__bad_batch_dir=tmp_path / "bad",
        )
    text = str(error.value)
    assert "of 2 step(s) in a row, up to step 5" in text
    assert "max_bad_steps=2" in text
    assert "the term 'actor/pg_loss' of the loss is nan" in text
    assert str(tmp_path / "bad" / "step_5_update_actor.dataproto") in text
    assert train.steps[5]["recovery/bad_steps"] == 3  # the metrics of the last step are not lost
    assert {file.name for file in (tmp_path / "bad").iterdir()} == {
        f"step_{step}_update_actor.dataproto" for step in (2, 4, 5)
    }


# ---- the counter alone ----------------------------------------------------------------------------


def batch() -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.zeros(2, 3)}, non_tensors={"uid": ["a", "b"]})


def problem(row: int | None = 1) -> NonFinite:
    return NonFinite(kind="output", name="log_probs", value="nan", rank=0, row=row, token=2)


def see(counter: BadSteps, step: int, skipped: float = 1.0) -> None:
    counter.record(step, "update", {"train/skipped_steps": skipped}, batch(), [problem()])


def test_a_resumed_run_goes_on_counting(tmp_path):
    first, second = BadSteps(3, tmp_path), BadSteps(3, tmp_path)
    for step in (4, 5):
        see(first, step)
        first.stop_if_too_many(step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    see(second, 6)
    with pytest.raises(NonFiniteError, match=r"sample 1, response token 2 \[uid b\]"):
        second.stop_if_too_many(6)
    second.stop_if_too_many(7)  # a good step later
    see(second, 8)
    second.stop_if_too_many(8)
    assert second.metrics() == {"recovery/bad_steps": 4.0}


def test_actor_and_critic_of_one_step_are_one_bad_step(tmp_path):
    counter = BadSteps(2, tmp_path)
    see(counter, 1)
    see(counter, 1)
    counter.stop_if_too_many(1)
    assert counter.metrics() == {"recovery/bad_steps": 1.0}


def test_the_folder_is_bounded_and_null_never_stops(tmp_path):
    counter = BadSteps(None, tmp_path / "bad")
    for step in range(1, 4 * SAVED_BATCHES, 2):
        see(counter, step)
        counter.stop_if_too_many(step)
    kept = sorted(int(file.stem.split("_")[1]) for file in (tmp_path / "bad").iterdir())
    assert kept == list(range(4 * SAVED_BATCHES - 1, 2 * SAVED_BATCHES, -2))[::-1]  # the newest


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    counter = BadSteps(1, tmp_path / "file" / "bad")
    with caplog.at_level(logging.WARNING):
        see(counter, 1)
    assert "cannot be kept" in caplog.text
    with pytest.raises(NonFiniteError):
        counter.stop_if_too_many(1)


def test_rows_of_ranks_become_rows_of_the_batch():
    # Four samples dealt to two ranks as 2 0 | 3 1: row 1 of rank 1 is sample 1.
    found = in_batch_order([NonFinite(kind="output", name="x", value="nan", rank=1, row=1)], [2, 0, 3, 1], 2)
    assert [one.row for one in found] == [1]
