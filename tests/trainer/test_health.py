"""Each rule of health speaks when its metric goes wrong, and is silent on a run that goes well."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.trainer.health import DESCRIPTIONS, FINITE, HealthWatch, health_metrics


def rules(name: str, values: list[float]) -> list[tuple[int, str]]:
    watch = HealthWatch()
    found = [alert for step, value in enumerate(values, 1) for alert in watch.check(step, {name: value})]
    return [(alert.step, alert.rule) for alert in found]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        # 51 equal values are 50 steps without a change
        ("critic/score/mean", [0.5] * 51, [(51, "reward_stuck")]),
        ("critic/score/mean", [0.5] * 50 + [0.6], []),
        ("reward/equal_group_rate", [1.0] * 20, [(20, "equal_groups")]),
        ("reward/equal_group_rate", [0.9] * 40, []),
        # the mean of the last 20 at step 39: (1 + 19·0.05) / 20 = 0.0975, less than a tenth of 1
        ("actor/entropy", [1.0] * 20 + [0.05] * 20, [(39, "entropy_collapse")]),
        ("actor/entropy", [1.0] * 20 + [0.2] * 30, []),
        # (15·0.002 + 5·0.04) / 20 = 0.0115: the first mean above 0.01, and above 3·0.002
        ("training/rollout_probs_diff_mean", [0.002] * 20 + [0.04] * 5, [(25, "gap_growing")]),
        ("training/rollout_probs_diff_mean", [0.02] * 60, []),
        # 0.1 at first; 7 of 20 at 0.8 give (13·0.1 + 7·0.8) / 20 = 0.345
        ("response_length/clip_ratio", [0.1] * 20 + [0.8] * 7, [(26, "truncation")]),
        ("response_length/clip_ratio", [0.9] * 25, [(5, "truncation")]),
        ("response_length/clip_ratio", [0.9] * 4 + [0.4] * 20, []),
        ("actor/ppo_kl", [0.01] * 21 + [0.5], [(22, "kl_runaway")]),
        ("actor/ppo_kl", [0.001] * 21 + [0.05], []),
        ("actor/grad_norm", [1.0] * 21 + [11.0], [(22, "grad_spike")]),
        ("actor/grad_norm", [1.0] * 21 + [9.0], []),
        ("critic/grad_norm", [1.0] * 21 + [11.0], [(22, "grad_spike")]),
        ("reward/error_rate", [0.0, 0.06], [(2, "reward_errors")]),
        ("val-core/gsm8k/acc/mean@4", [0.0] * 9, [(3, "validation_zero")]),
        ("val-core/gsm8k/acc/mean@4", [0.0, 0.1, 0.0, 0.0, 0.0], []),
        ("val-core/gsm8k/acc/maj@4/mean", [0.0] * 9, []),  # a majority may be wrong where some are right
    ],
)
def test_rules(metric, values, expected):
    assert rules(metric, values) == expected


def test_a_value_that_is_not_finite_is_told_at_once():
    assert [rules(name, [1.0, float("nan")]) for name in FINITE] == [[(2, "not_finite")]] * len(FINITE)


@pytest.mark.parametrize(("of_policy", "told"), [({}, []), ({"actor/pg_loss": 0.0}, [(51, "reward_stuck")])])
def test_rewards_that_do_not_change_are_no_trouble_where_only_a_teacher_is_learnt_from(of_policy, told):
    watch, metrics = HealthWatch(), {"critic/score/mean": 0.0, "distillation/loss": 1.0} | of_policy
    assert [(alert.step, alert.rule) for step in range(1, 52) for alert in watch.check(step, metrics)] == told


def test_each_data_source_of_validation_is_watched_for_itself():
    watch = HealthWatch()
    for step in (0, 10, 20):
        alerts = watch.check(step, {"val-core/a/acc/mean@1": 0.5, "val-core/b/reward/mean@1": 0.0})
    assert [(alert.step, alert.metric) for alert in alerts] == [(20, "val-core/b/reward/mean@1")]


def test_every_rule_is_described_on_the_page_too():
    names = ["actor/kl_loss", "actor/loss", "val-core/a/acc/mean@1", "val-core/b/acc/mean@1", "timing_s/step"]
    tested = health_metrics(names)
    assert tested.keys() == DESCRIPTIONS.keys()
    expected = {"not_finite": names[1:2], "kl_runaway": names[:1], "validation_zero": names[2:4]}
    assert {rule: metrics for rule, metrics in tested.items() if metrics} == expected
    page = (Path(__file__).parents[2] / "docs/internals/view.md").read_text()
    for title, condition in DESCRIPTIONS.values():
        assert f"| {title.lower()} | {condition} |" in page.replace("KL running", "kl running")


def test_trouble_that_goes_on_is_told_once_and_again_after_a_pause():
    # silent while it lasts; after 20 steps without trouble the next one is new
    values = [0.0] + [0.5] * 30 + [0.0] * 20 + [0.5]
    assert rules("reward/error_rate", values) == [(2, "reward_errors"), (52, "reward_errors")]


def test_the_reason_has_the_numbers():
    watch = HealthWatch()
    for step in range(1, 22):
        watch.check(step, {"actor/grad_norm": 2.0})
    (alert,) = watch.check(22, {"actor/grad_norm": 50.0})
    assert alert.reason == "the gradient's norm is 50, 2 in the 20 steps before."
    assert (alert.metric, alert.samples) == ("actor/grad_norm", "advantage")
