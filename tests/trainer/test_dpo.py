"""Direct preference optimisation in miniature, through the entry point that users call."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.preferences import numbers_of, preference_rows, preference_run
from tests.support.tiny_run import write_jsonl
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.trainer.dpo_trainer import run_dpo


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    return preference_run(run_dpo, "dpo_trainer", tmp_path, tiny_model_dir(tmp_path / "model"), log)


def log_probs(folder: Path | str, rows: list[dict[str, str]]) -> torch.Tensor:
    """log π of the chosen and the rejected response of each row, (rows, 2), by Transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        for side in ("chosen", "rejected"):
            user = [{"role": "user", "content": row["prompt"]}]
            whole = [*user, {"role": "assistant", "content": row[side]}]
            start = len(tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False))
            ids = torch.tensor(tokenizer.apply_chat_template(whole, return_dict=False))
            with torch.no_grad():
                log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            found.append(log_p[:-1].gather(-1, ids[1:, None])[start - 1 :].sum())
    return torch.stack(found).view(-1, 2)


@pytest.mark.slow
def test_it_learns_the_rule_behind_the_preferences(train, tmp_path):
    many = write_jsonl(tmp_path / "many.jsonl", preference_rows(256, seed=2))
    steps = train(40, data__train_files=many, data__train_batch_size=16, loss__beta=0.5)
    # At the start the policy is its own reference.
    assert steps[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(steps[1]["train/margin"]) < 1e-4
    assert steps[40]["val/accuracy"] >= 0.9  # pairs that it has not seen
    assert steps[40]["val/margin"] > 1
    held_out = preference_rows(10, seed=1)
    after = log_probs(tmp_path / "run" / "global_step_40" / "huggingface", held_out)
    rewards = 0.5 * (after - log_probs(tmp_path / "model", held_out))
    gap = rewards[:, 0] - rewards[:, 1]
    assert steps[40]["val/logps/chosen"] == pytest.approx(after[:, 0].mean().item(), rel=1e-4)
    assert steps[40]["val/rewards/chosen"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-3, abs=1e-3)
    assert steps[40]["val/rewards/rejected"] == pytest.approx(rewards[:, 1].mean().item(), rel=1e-3, abs=1e-3)
    assert steps[40]["val/loss"] == pytest.approx((1 + (-gap).exp()).log().mean().item(), rel=1e-3, abs=1e-4)


def test_the_reference_stays_while_the_policy_moves_and_through_a_resume(train):
    # 24 pairs in batches of 8 make an epoch of 3 steps: the break after step 3 is at its end.
    straight = train(5, "straight")
    for stop in (2, 3):
        train(stop, f"stopped_{stop}")
        rest = train(5, f"stopped_{stop}")
        assert list(rest) == list(range(stop + 1, 6))
        for step, metrics in rest.items():
            assert numbers_of(metrics) == numbers_of(straight[step])
    # a reference that was resumed with the policy would make the rewards of step 4 zero
    assert abs(straight[4]["train/margin"]) > 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"loss__loss_type": "ipo"},
        {"loss__loss_type": "hinge"},
        {"loss__label_smoothing": 0.1, "loss__sft_coef": 0.1},
        {"loss__reference_free": "true", "loss__average_log_prob": "true", "loss__beta": 2.0, "loss__margin": 0.5},
    ],
    ids=["ipo", "hinge", "cdpo with sft", "simpo"],
)
def test_every_loss_lowers_itself(train, changes):
    steps = train(9, trainer__save_freq=-1, **changes)
    first, last = (sum(steps[step]["train/loss"] for step in epoch) for epoch in ((1, 2, 3), (7, 8, 9)))
    assert last < first
    assert ("train/sft_loss" in steps[1]) == ("loss__sft_coef" in changes)


def test_rewards_are_ratios_to_the_reference_that_is_named(train, tmp_path):
    other = tiny_model_dir(tmp_path / "other", seed=1)
    steps = train(2, ref__path=other)
    held_out = preference_rows(10, seed=1)
    policy = tmp_path / "run" / "global_step_2" / "huggingface"
    rewards = 0.1 * (log_probs(policy, held_out) - log_probs(other, held_out))
    assert steps[2]["val/rewards/chosen"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-3)
    assert steps[2]["val/rewards/rejected"] == pytest.approx(rewards[:, 1].mean().item(), rel=1e-3)


@pytest.mark.slow
def test_two_ranks_on_ray_give_the_numbers_of_one_local_rank(train, ray_cluster):
    local = train(2, "local")
    budget = {"data__use_dynamic_bsz": "true", "data__max_token_len_per_gpu": 64}
    ray = train(2, "ray", trainer__controller="ray", trainer__n_gpus_per_node=2, **budget)
    for step, metrics in local.items():
        assert numbers_of(ray[step]) == pytest.approx(numbers_of(metrics), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"loss__loss_type": "ipo", "loss__label_smoothing": 0.1}, "has no label smoothing"),
        ({"loss__loss_type": "ipo", "loss__average_log_prob": "true"}, "IPO is defined on whole responses"),
        ({"loss__reference_free": "true", "ref__path": "/x"}, "no reference is read"),
        ({"ref__path": "/nowhere"}, "ref.path=/nowhere: there is no such folder"),
        ({"loss__loss_type": "kto"}, "sigmoid"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(train, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        train(1, **changes)
