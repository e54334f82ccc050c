"""Whole runs with shared prompts: the same metrics as without them, with passes by rows and by tokens."""

import json

import pytest

from verl.testing.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo


def metrics_of(folder, paths, monkeypatch, shares, **more):
    log = folder / f"metrics_{shares}.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    settings = {
        "actor_rollout_ref__actor__use_prefix_grouper": shares,
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__rollout__name": "native",
        "custom_reward_function__path": folder / "reward.py",
        "trainer__total_training_steps": 2,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
        "trainer__save_freq": -1,
        **more,
    }
    run_ppo(compose(overrides(paths, folder / f"run_{shares}", **settings)))
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_run_is_the_same(by_tokens, tmp_path, monkeypatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    more = {"actor_rollout_ref__actor__use_dynamic_bsz": True} if by_tokens else {}
    more |= {"actor_rollout_ref__rollout__log_prob_use_dynamic_bsz": True} if by_tokens else {}
    if by_tokens:
        more["actor_rollout_ref__actor__ppo_max_token_len_per_gpu"] = 70
    plain, shared = (metrics_of(tmp_path, paths, monkeypatch, shares, **more) for shares in (False, True))
    same = {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy"}
    for before, after in zip(plain, shared, strict=True):
        assert same - {"actor/entropy"} <= before.keys()
        for name in same & before.keys():
            assert after[name] == pytest.approx(before[name], abs=2e-5, rel=1e-4), name
