import pytest

from verl.trainer.ppo.validation import validation_metrics


def test_core_and_auxiliary_names_by_hand():
    # Two prompts, two responses each: a scores 1 0, b scores 1 1. mean@2 = ((1+0)/2 + (1+1)/2) / 2 = 0.75.
    # best@2 of a: two draws with replacement miss the 1 with chance 1/4, so 3/4; of b: 1. Mean 0.875.
    metrics = validation_metrics(
        ["math"] * 4, ["a", "a", "b", "b"], {"reward": [1.0, 0.0, 1.0, 1.0], "reward_status": ["ok"] * 4}
    )
    assert metrics["val-core/math/reward/mean@2"] == pytest.approx(0.75)
    assert metrics["val-core/math/reward/best@2/mean"] == pytest.approx(0.875)
    assert "val-aux/math/reward/std@2" in metrics
    assert metrics["val-aux/error_rate"] == 0


def test_accuracy_is_core_where_a_scorer_gives_it():
    metrics = validation_metrics(["m"] * 2, ["a", "b"], {"reward": [1.5, -0.5], "acc": [1.0, 0.0]})
    assert metrics["val-core/m/acc/mean@1"] == pytest.approx(0.5)
    assert metrics["val-aux/m/reward/mean@1"] == pytest.approx(0.5)


def test_a_failed_sample_is_no_zero():
    metrics = validation_metrics(
        ["m"] * 2, ["a", "b"], {"reward": [1.0, 0.0], "acc": [1.0, None], "reward_status": ["ok", "error"]}
    )
    assert metrics["val-core/m/acc/mean@1"] == 1.0
    assert metrics["val-aux/error_rate"] == 0.5


def test_each_source_has_its_own_variables():
    # Only the scorer of `m` gives an accuracy; the other source has a reward alone.
    metrics = validation_metrics(
        ["m", "m", "g"], ["a", "b", "c"], {"reward": [1.0, -1.0, 0.25], "acc": [True, False, None]}
    )
    assert metrics["val-core/m/acc/mean@1"] == 0.5
    assert metrics["val-core/g/reward/mean@1"] == 0.25
    assert "val-aux/g/acc/mean@1" not in metrics
