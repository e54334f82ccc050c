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
    assert metrics["val-core/math/reward/pass@2"] == 1  # each prompt has a right response
    assert "val-aux/math/reward/std@2" in metrics
    assert metrics["val-aux/error_rate"] == 0


def test_accuracy_is_core_where_a_scorer_gives_it():
    metrics = validation_metrics(["m"] * 2, ["a", "b"], {"reward": [1.5, -0.5], "acc": [1.0, 0.0]})
    assert metrics["val-core/m/acc/mean@1"] == pytest.approx(0.5)
    assert metrics["val-aux/m/reward/mean@1"] == pytest.approx(0.5)


def test_each_source_has_its_own_variables():
    # Only the scorer of `m` gives an accuracy; the other source has a reward alone.
    metrics = validation_metrics(
        ["m", "m", "g"], ["a", "b", "c"], {"reward": [1.0, -1.0, 0.25], "acc": [True, False, None]}
    )
    assert metrics["val-core/m/acc/mean@1"] == 0.5
    assert metrics["val-core/g/reward/mean@1"] == 0.25
    assert "val-aux/g/acc/mean@1" not in metrics


def three_prompts(failed, **more):
    """Three prompts of four responses with the rewards 1, 0 and 1; some could not be scored."""
    rewards = [1.0] * 4 + [0.0] * 4 + [1.0] * 4
    status = ["timeout" if row in failed else "ok" for row in range(12)]
    columns = {"reward": rewards, "reward_status": status, **more}
    return validation_metrics(["m"] * 12, [row // 4 for row in range(12)], columns)


@pytest.mark.parametrize("failed", [(), (5,), (1, 5, 9), (4, 5, 6)])
def test_failed_samples_change_neither_names_nor_what_the_others_say(failed):
    metrics = three_prompts(failed)
    assert metrics["val-core/m/reward/mean@4"] == pytest.approx(2 / 3)
    assert metrics["val-core/m/reward/best@4/mean"] == pytest.approx(2 / 3)
    assert metrics["val-aux/m/reward/worst@2/mean"] == pytest.approx(2 / 3)
    assert metrics["val-aux/m/reward/std@4"] == 0
    assert metrics["val-aux/m/failed_samples"] == len(failed)
    assert metrics["val-aux/m/unscored_prompts"] == 0
    assert metrics["val-aux/error_rate"] == pytest.approx(len(failed) / 12)
    assert metrics.keys() == three_prompts(()).keys()


def test_a_prompt_without_any_score_is_in_no_mean_and_counted():
    metrics = three_prompts((4, 5, 6, 7))
    assert metrics["val-core/m/reward/mean@4"] == 1.0
    assert (metrics["val-aux/m/failed_samples"], metrics["val-aux/m/unscored_prompts"]) == (4, 1)
    nothing = three_prompts(range(12))
    assert nothing == {"val-aux/error_rate": 1.0, "val-aux/m/failed_samples": 12, "val-aux/m/unscored_prompts": 3}


def test_values_that_are_missing_are_left_out_of_their_own_variable_alone():
    nan, acc = float("nan"), [1.0, 0.0, None, 1.0] + [0.0] * 4 + [1.0] * 4
    for missing in (None, nan, float("inf"), 10**400):
        acc[2] = missing
        metrics = three_prompts((5,), acc=acc, pred=["a", "b", "b", "a"] * 3)
        # Of the first prompt 1, 0, 1 are left: (2/3 + 0 + 1) / 3 = 5/9; best of two draws 1 - (1/3)^2 = 8/9.
        assert metrics["val-core/m/acc/mean@4"] == pytest.approx(5 / 9)
        assert metrics["val-aux/m/acc/best@2/mean"] == pytest.approx((8 / 9 + 0 + 1) / 3)
        assert metrics["val-aux/m/reward/mean@4"] == pytest.approx(2 / 3)
        assert metrics["val-aux/m/acc/missing"] == 1
        # b is drawn once in three, and first: both b 1/9, b then a 2/9 → a wins 2/3 of the pairs.
        assert metrics["val-aux/m/acc/maj@2/mean"] == pytest.approx((2 / 3 + 0 + 1) / 3, abs=0.02)
