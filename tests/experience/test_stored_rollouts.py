"""Runs that train on the responses of an earlier run, and runs that only sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.test_run import assert_same_steps, train  # noqa: F401
from verl.config import ActorRolloutRefConfig, PPOConfig, RolloutConfig
from verl.errors import DataError
from verl.experience.stored_rollouts import StoredRollouts
from verl.protocol import DataProto

ROLLOUT = "actor_rollout_ref__rollout__"


def texts(folder: Path) -> dict[str, list[str]]:
    """The responses of each step of a run."""
    files = sorted(folder.glob("*.jsonl"))
    return {file.stem: [json.loads(line)["output"] for line in file.read_text().splitlines()] for file in files}


def test_a_second_run_trains_on_the_responses_of_the_first(train, tmp_path):  # noqa: F811
    common = {f"{ROLLOUT}skip_rollout": "true", f"{ROLLOUT}skip_dump_dir": tmp_path / "kept"}
    common |= {"algorithm__adv_estimator": "remax", f"{ROLLOUT}n": 2}
    first = train(trainer__rollout_data_dir=tmp_path / "first", **common)
    again = train(trainer__rollout_data_dir=tmp_path / "again", **common)
    faster = train(trainer__rollout_data_dir=tmp_path / "faster", actor_rollout_ref__actor__optim__lr=0.3, **common)
    assert [steps[2].pop("training/stored_rollouts") for steps in (first, again)] == [0.0, 1.0]
    assert [steps[1].pop("training/stored_rollouts") for steps in (first, again)] == [0.0, 1.0]
    assert_same_steps(first, again, rel=0)  # reward baselines of the greedy responses too
    files = {"1-0", "2-0", "1-0-greedy", "2-0-greedy"}
    assert {file.stem for file in (tmp_path / "kept").iterdir()} == files
    # A policy that moves faster is trained on the same responses, from which it is farther away.
    assert texts(tmp_path / "first") == texts(tmp_path / "faster")
    gap = "training/rollout_probs_diff_mean"
    assert faster[2][gap] > 100 * first[2][gap]


class Drawn:
    """Draws as many tokens as it was called before; prompts of two tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict(tensors={"responses": torch.full((len(prompts), 3), self.calls)})


def prompts_of(step: int, tokens: list[list[int]], **meta: object) -> DataProto:
    names = {"uid": np.array([f"{step}-{row}" for row in range(len(tokens))], dtype=object)}
    names["sample_index"] = np.zeros(len(tokens), dtype=int)
    ids = torch.tensor(tokens)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info=meta)


def stored(folder: Path, draw: Drawn, **rollout: object) -> StoredRollouts:
    settings = RolloutConfig(skip_rollout=True, skip_dump_dir=str(folder), **rollout)
    return StoredRollouts(PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(rollout=settings)), draw)


def test_responses_are_found_by_step_and_kind_and_those_of_validation_are_drawn(tmp_path):
    draw, ids = Drawn(), [[5, 6], [7, 8]]
    kept = stored(tmp_path, draw)
    asked = [prompts_of(1, ids), prompts_of(1, ids, do_sample=False), prompts_of(2, ids)]
    assert [kept.answer(one).batch["responses"][0, 0].item() for one in asked] == [1, 2, 3]
    assert kept.metrics() == {"training/stored_rollouts": 0.0}
    assert [kept.answer(one).batch["responses"][0, 0].item() for one in asked] == [1, 2, 3]
    assert kept.answer(prompts_of(3, ids)).meta_info == {}
    assert kept.metrics() == {"training/stored_rollouts": 0.75}  # six rows of eight
    assert kept.answer(prompts_of(1, ids, validate=True)).batch["responses"][0, 0].item() == 5


def test_what_was_drawn_otherwise_is_refused(tmp_path, caplog):
    draw, prompts = Drawn(), prompts_of(1, [[5, 6]])
    stored(tmp_path, draw).answer(prompts)
    with pytest.raises(DataError, match=r"drawn with rollout\.temperature=1\.0 \(now 0\.5\).*skip_dump_dir"):
        stored(tmp_path, draw, temperature=0.5).answer(prompts)
    with pytest.raises(DataError, match="responses to other prompts"):
        stored(tmp_path, draw).answer(prompts_of(1, [[5, 9]]))
    with pytest.raises(DataError, match="responses to other prompts"):
        stored(tmp_path, draw).answer(prompts_of(1, [[5, 6], [5, 6]]))
    file = tmp_path / "1-0.safetensors"
    other = DataProto.load_from_disk(file)
    other.meta_info["drawn_for"]["model"] = "another"
    other.save_to_disk(file)
    assert stored(tmp_path, draw).answer(prompts).batch["responses"].tolist() == [[1, 1, 1]]
    assert "drawn by another" in caplog.text
    other.meta_info.pop("drawn_for")
    other.save_to_disk(file)
    with pytest.raises(DataError, match=r"no file of rollout\.skip_rollout"):
        stored(tmp_path, draw).answer(prompts)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        stored(tmp_path, draw).answer(prompts)


def test_rollouts_without_training(train, tmp_path):  # noqa: F811
    only = {"trainer__rollout_only": "true", "trainer__save_freq": 1, "trainer__rollout_token_dump_freq": 1}
    critic = {"algorithm__adv_estimator": "gae"}
    steps = train(trainer__rollout_data_dir=tmp_path / "rollouts", **only, **critic)
    assert not (tmp_path / "checkpoints").exists()
    written = {f"{step}.{kind}" for step in (1, 2) for kind in ("jsonl", "arrow", "numbers.json")}
    assert {file.name for file in (tmp_path / "rollouts").iterdir()} == written
    assert {"critic/score/mean", "actor/entropy", "critic/advantages/mean"} <= steps[2].keys()
    assert not {"actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"} & steps[2].keys()
    # An update would have moved the policy, and what it draws in the second step.
    trained = train(trainer__rollout_data_dir=tmp_path / "trained", actor_rollout_ref__actor__optim__lr=0.1, **critic)
    assert trained[1]["actor/entropy"] == steps[1]["actor/entropy"]
    assert abs(trained[2]["actor/entropy"] - steps[2]["actor/entropy"]) > 0.01
