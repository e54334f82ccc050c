"""Runs in which some samples cannot be scored, and what else the reward function may do to the columns of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from tests.trainer.test_run import assert_same_steps
from verl.errors import RewardError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

ACTOR = "actor_rollout_ref__actor"
FAILS_SOMETIMES = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    if extra_info['index'] % 2 == 0 and sum(map(ord, solution_str)) % 3 == 0:\n"
    "        raise ValueError('no such test case')\n"
    "    return sum(c.isdigit() for c in solution_str) / 8\n"
)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with a reward function and changed settings; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(reward: str = FAILS_SOMETIMES, **changes: object) -> dict[int, dict[str, float]]:
        (tmp_path / "reward.py").write_text(reward)
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "reward_model__max_error_rate": 1.0,
            "trainer__rollout_data_dir": tmp_path / "rollouts",
        } | changes
        run_ppo(compose(overrides(paths, tmp_path, **settings)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


def test_scoring_beside_the_log_probs_changes_no_number(train):
    # A failed sample leaves the entropy, too, and what is measured of it decides the entropy bonus.
    changes = {f"{ACTOR}__entropy_target": 10.0, f"{ACTOR}__entropy_target_step": 0.01}
    before = train(**changes)
    beside = train(**changes, reward_model__launch_reward_fn_async="true")
    assert before[1]["reward/error_rate"] > 0
    assert_same_steps(before, beside, rel=0)


@pytest.mark.parametrize("policy", ["mask", "drop_group"])
def test_dynamic_sampling_fills_the_batch_with_prompts_that_are_trained_on(train, tmp_path, policy):
    steps = train(
        reward_model__on_failure=policy,
        algorithm__filter_groups__enable="true",
        algorithm__filter_groups__metric="seq_reward",
        data__gen_batch_size=2,
        trainer__total_training_steps=1,
        **{f"{ACTOR}__loss_agg_mode": "prompt-mean"},
    )
    dumped = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    draws = steps[1]["training/filter_groups/num_gen_batches"]
    assert draws > 2
    assert len(dumped) == draws * 2 * 4  # every response of every draw
    # Metrics of the reward are of all that was scored.
    failed = sum(record["reward_status"] == "error" for record in dumped)
    assert steps[1]["reward/status/error"] == pytest.approx(failed / len(dumped))
    scores = [record["score"] for record in dumped if record["reward_status"] == "ok"]
    assert steps[1]["reward/score/mean"] == pytest.approx(sum(scores) / len(scores))
    # The prompts that are kept differ among the responses that are trained on.
    groups = [dumped[start : start + 4] for start in range(0, len(dumped), 4)]
    informative = []
    for group in groups:
        kept = [record["score"] for record in group if record["reward_status"] == "ok"]
        informative.append(len(set(kept)) > 1 and (policy == "mask" or len(kept) == 4))
    assert steps[1]["training/filter_groups/kept_ratio"] == pytest.approx(sum(informative) / len(groups))
    assert steps[1]["training/filter_groups/surplus"] == sum(informative) - 4


def test_a_column_of_the_data_may_be_called_like_a_value_of_the_reward(train, tmp_path):
    rows = [row | {"acc": "of the data", "score": -1} for row in countdown_rows(16)]
    steps = train(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) / 8, 'acc': True, 'reward': 3.0, 'input': 'mine'}\n",
        data__train_files=write_jsonl(tmp_path / "named.jsonl", rows),
        trainer__total_training_steps=1,
        trainer__val_before_train="true",
    )
    assert steps[1]["reward/acc/mean"] == 1
    assert 0 < steps[1]["reward/score/mean"] <= 1
    assert steps[0]["val-core/countdown/acc/mean@1"] == 1
    assert 0 < steps[0]["val-aux/countdown/reward/mean@1"] <= 1  # the score, not what the function calls so
    line = json.loads((tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()[0])
    assert line["input"] != "mine"


def test_validation_batches_may_have_other_values(train, tmp_path):
    # Batches of one prompt: the first knows no accuracy, the second no style.
    rows = [row | {"data_source": f"s{i}"} for i, row in enumerate(countdown_rows(2))]
    steps = train(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.5, **({'style': 2} if data_source == 's0' else {'acc': 1.0})}\n",
        data__val_files=write_jsonl(tmp_path / "two.jsonl", rows),
        data__val_batch_size=1,
        trainer__val_before_train="true",
        trainer__val_only="true",
    )
    assert steps[0]["val-core/s0/reward/mean@1"] == 0.5
    assert steps[0]["val-core/s1/acc/mean@1"] == 1.0
    assert steps[0]["val-aux/s0/style/mean@1"] == 2
    assert "val-aux/s1/style/mean@1" not in steps[0]


def test_the_name_of_a_column_is_refused_with_its_meaning(train):
    with pytest.raises(RewardError, match=r"returned 'index'.*number of the prompt in its data set"):
        train(
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return {'score': 0.5, 'index': 3}\n"
        )


def test_a_step_in_which_everything_failed_steers_nothing(train):
    # All responses of step 1 fail. The entropy bonus and the weight of the KL are what they would have been without it.
    steps = train(
        "from pathlib import Path\n"
        "calls = Path(__file__).with_suffix('.calls')\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    with calls.open('a') as file:\n"
        "        file.write('.')\n"
        "    if calls.stat().st_size <= 16:\n"  # four prompts, four responses each
        "        raise ValueError('not yet')\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n",
        algorithm__use_kl_in_reward="true",
        algorithm__kl_ctrl__type="adaptive",
        algorithm__kl_ctrl__horizon=16,
        **{f"{ACTOR}__entropy_target": 10.0, f"{ACTOR}__entropy_target_step": 0.01},
    )
    assert steps[1]["reward/left_out_rate"] == 1
    assert steps[1]["actor/grad_norm"] == 0
    assert "actor/entropy" not in steps[1]
    assert steps[2]["actor/entropy_coeff"] == pytest.approx(0.0)  # its first measurement acts on the step after
    assert steps[2]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.001)
