"""Reward models from preferences, in miniature, and what main_ppo makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.preferences import numbers_of, preference_rows, preference_run
from tests.support.tiny_run import make_tiny_run, overrides, write_jsonl
from verl.errors import ConfigError
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.rm_trainer import run_rm
from verl.workers.reward_input import RewardInput


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    return preference_run(run_rm, "rm_trainer", tmp_path, tiny_model_dir(tmp_path / "model"), log)


def score(folder: Path, ids: list[int]) -> float:
    """By Transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.item()


def test_it_learns_the_rule_behind_the_preferences(train, tmp_path):
    many = write_jsonl(tmp_path / "many.jsonl", preference_rows(256, seed=2))
    steps = train(40, data__train_files=many, data__train_batch_size=16)
    # The head starts at zero: all rewards are 0, every pair is a tie.
    assert steps[1]["train/loss"] == pytest.approx(math.log(2))
    assert steps[1]["train/accuracy"] == 0.5
    assert steps[40]["train/loss"] < 0.4
    # pairs that it has not seen
    assert steps[40]["val/accuracy"] >= 0.9
    assert steps[40]["val/margin"] > 1
    # the validation metrics are those of scoring every pair by itself
    folder = tmp_path / "run" / "global_step_40" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards = []
    for row in preference_rows(10, seed=1):
        for side in ("chosen", "rejected"):
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            rewards.append(score(folder, tokenizer.apply_chat_template(chat, return_dict=False)))
    chosen, rejected = torch.tensor(rewards).view(-1, 2).unbind(-1)
    assert steps[40]["val/rewards/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4)
    assert steps[40]["val/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert steps[40]["val/loss"] == pytest.approx((1 + (rejected - chosen).exp()).log().mean().item(), rel=1e-4)
    # the shards merged are the folder that was exported
    merge(tmp_path / "run" / "global_step_40", tmp_path / "merged")
    assert score(tmp_path / "merged", [2, 9, 3, 8, 1]) == score(folder, [2, 9, 3, 8, 1])


@pytest.mark.slow
def test_centring_keeps_rewards_around_zero(train):
    plain = train(15, optim__lr=1e-2)[15]
    centred = train(15, "centred", optim__lr=1e-2, loss__center_rewards_coefficient=1.0)[15]
    level = {name: abs(run["val/rewards/chosen"] + run["val/rewards/rejected"]) for name, run in
             (("plain", plain), ("centred", centred))}  # fmt: skip
    assert level["centred"] < 0.5 * level["plain"]


@pytest.mark.slow
def test_a_resumed_run_continues_where_it_stopped(train):
    # 24 pairs in batches of 8 make an epoch of 3 steps: the break after step 3 is at its end.
    straight = train(5, "straight")
    for stop in (2, 3):
        train(stop, f"stopped_{stop}")
        rest = train(5, f"stopped_{stop}")
        assert list(rest) == list(range(stop + 1, 6))
        for step, metrics in rest.items():
            assert numbers_of(metrics) == numbers_of(straight[step])
    assert straight[5]["val/loss"] != straight[5]["train/loss"]


@pytest.mark.slow
def test_two_ranks_on_ray_give_the_numbers_of_one_local_rank(train, ray_cluster):
    # Other passes, and pairs dealt out by their tokens.
    budget = {"data__use_dynamic_bsz": "true", "data__max_token_len_per_gpu": 64, "data__balance_dp_token": "true"}
    local = train(3, "local")
    ray = train(3, "ray", trainer__controller="ray", trainer__n_gpus_per_node=2, **budget)
    assert local.keys() == ray.keys() == {1, 2, 3}
    for step, metrics in local.items():
        assert numbers_of(ray[step]) == pytest.approx(numbers_of(metrics), rel=1e-4, abs=1e-6)


def test_main_ppo_scores_with_it(train, tmp_path, monkeypatch):
    train(15)
    folder = tmp_path / "run" / "global_step_15" / "huggingface"
    seen = []
    place = RewardInput.place

    def watched(self, scores, batch):
        seen.append((batch, scores))
        return place(self, scores, batch)

    monkeypatch.setattr(RewardInput, "place", watched)
    log = tmp_path / "ppo.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    changes = {"reward_model__enable": "true", "reward_model__model__fsdp_config__dtype": "float32"}
    paths = make_tiny_run(tmp_path / "ppo") | {"reward_model": str(folder)}
    run_ppo(compose(overrides(paths, tmp_path / "ppo", **changes)))
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    assert len(steps) == len(seen) == 2
    for metrics, (batch, scores) in zip(steps, seen, strict=True):
        direct = [
            score(folder, ids[mask.bool()].tolist())
            for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
        ]
        assert len(direct) == 16  # 4 prompts, 4 responses each
        assert_close(scores, torch.tensor(direct), atol=1e-5, rtol=1e-5)
        assert metrics["critic/score/mean"] == pytest.approx(sum(direct) / 16, rel=1e-4)
        assert scores.std() > 0.01
        assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data__train_batch_size": 7, "trainer__n_gpus_per_node": 2, "trainer__controller": "ray"}, "share these"),
        ({"data__use_dynamic_bsz": "true", "data__max_token_len_per_gpu": 32}, "the longest sequence has 64 tokens"),
        ({"data__train_batch_size": 100}, "24 rows, fewer than one batch"),
        ({"loss__label_smoothing": 0.7}, "loss.label_smoothing=0.7"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(train, changes, problem):
    with pytest.raises(Exception, match=problem) as caught:
        train(1, **changes)
    assert isinstance(caught.value, ConfigError) or "fewer" in problem
