"""Validation metrics: exact values by enumeration, the bootstrap as the slow oracle."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val, process_validation_metrics


def one_prompt(**columns: list) -> dict[str, dict[str, float]]:
    size = len(next(iter(columns.values())))
    return process_validation_metrics(["s"] * size, ["p"] * size, columns)["s"]


def draws(scores: list[float], k: int, reduce) -> tuple[float, float]:
    """Exact mean and deviation over all k draws with replacement."""
    values = [reduce(draw) for draw in itertools.product(scores, repeat=k)]
    return statistics.fmean(values), statistics.pstdev(values)


def test_one_response_has_a_mean_alone():
    assert one_prompt(reward=[0.25]) == {"reward": {"mean@1": 0.25}}


def test_all_numbers_of_a_prompt_by_enumeration():
    scores = [0.0, 1.0, 0.5, 0.0]
    found = one_prompt(acc=scores)["acc"]
    expected = {"mean@4": 0.375, "std@4": statistics.pstdev(scores)}
    for k in (2, 4):
        for name, reduce in (("best", max), ("worst", min)):
            expected[f"{name}@{k}/mean"], expected[f"{name}@{k}/std"] = draws(scores, k, reduce)
    assert found == pytest.approx(expected)
    assert found["best@2/mean"] > found["mean@4"] > found["worst@2/mean"]


def test_pass_at_k_by_hand():
    # a: 1 right of 4, b: none, c: 3 of 4. Two of a's four without replacement: 1 - C(3,2)/C(4,2) = 1 - 3/6 = 1/2;
    # of c's: at most one is wrong, so 1. All four: a and c have a right one.
    scores = [0, 0, 1, 0] + [0] * 4 + [1, 1, 0, True]
    found = process_validation_metrics(["s"] * 12, [row // 4 for row in range(12)], {"acc": scores})["s"]["acc"]
    assert found["pass@2"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert "pass@1" not in found  # it is mean@4
    # 50 wrong ones of 100, 16 drawn: 1 - C(50,16)/C(100,16) by the product of (50-i)/(100-i).
    many = one_prompt(acc=[1, 0] * 50)["acc"]
    assert many["pass@16"] == pytest.approx(1 - np.prod((50 - np.arange(16)) / (100 - np.arange(16))), rel=1e-12)


def test_pass_at_k_of_fewer_values_and_of_graded_scores():
    # Two of the four responses are left, one of them right: pass@2 and pass@4 draw both.
    missing = one_prompt(acc=[None, 1, 0, None])["acc"]
    assert (missing["pass@2"], missing["pass@4"], missing["mean@4"]) == (1, 1, 0.5)
    # A half in one prompt takes pass@k from the variable in that data source, not from the other source.
    found = process_validation_metrics(["m", "m", "m", "m", "g", "g"], list("aabbcc"), {"acc": [1, 0, 0.5, 0, 1, 0]})
    assert not any(name.startswith("pass@") for name in found["m"]["acc"])
    assert found["g"]["acc"]["pass@2"] == 1


def test_which_k_there_are():
    def ks(size: int) -> set[str]:
        return {
            name for name in one_prompt(reward=[0.0] * size)["reward"] if name.startswith("best") and "mean" in name
        }

    assert ks(2) == {"best@2/mean"}
    assert ks(3) == {"best@2/mean", "best@3/mean"}
    assert ks(8) == {"best@2/mean", "best@4/mean", "best@8/mean"}
    assert ks(10) == {"best@2/mean", "best@4/mean", "best@8/mean", "best@10/mean"}


def test_majority_by_hand():
    # "4" is given three times of four and right: one draw of two suffices to see that it wins with
    # probability (9 + 3 + 3/... )/16: both "4" 9/16, or "4" drawn first 3/16 → 0.75.
    found = one_prompt(acc=[1.0, 1.0, 1.0, 0.0], pred=["4", "4", "4", "5"])
    assert found["acc"]["maj@2/mean"] == pytest.approx(0.75, abs=0.05)
    assert found["acc"]["maj@4/mean"] > found["acc"]["maj@2/mean"]
    assert "pred" not in found


@pytest.mark.parametrize("k", [2, 4])
def test_majority_against_the_slow_form(k: int):
    preds, accs = ["a", "b", "b", "c"], [1.0, 0.0, 0.0, 1.0]
    rows = [{"pred": p, "acc": a} for p, a in zip(preds, accs, strict=True)]
    exact = [calc_maj_val(list(draw), "pred", "acc") for draw in itertools.product(rows, repeat=k)]
    found = one_prompt(acc=accs, pred=preds)["acc"]
    # 1000 resamples of a yes or no: deviation of the mean below 0.016
    assert found[f"maj@{k}/mean"] == pytest.approx(statistics.fmean(exact), abs=0.05)
    assert found[f"maj@{k}/std"] == pytest.approx(statistics.pstdev(exact), abs=0.05)


def test_majority_takes_the_first_of_equals():
    votes = [
        {"pred": "b", "acc": 0.25},
        {"pred": "a", "acc": 1.0},
        {"pred": "a", "acc": 2.0},
        {"pred": "b", "acc": 3.0},
    ]
    assert calc_maj_val(votes, "pred", "acc") == 0.25
    assert calc_maj_val(votes[1:], "pred", "acc") == 1.0


def test_prompts_are_averaged_within_their_source():
    found = process_validation_metrics(
        ["gsm8k", "math", "gsm8k", "gsm8k", "gsm8k"], ["p", "q", "p", "r", "r"], {"reward": [0.0, 7.0, 1.0, 1.0, 1.0]}
    )
    assert found["gsm8k"]["reward"]["mean@2"] == pytest.approx(0.75)
    assert found["gsm8k"]["reward"]["best@2/mean"] == pytest.approx((0.75 + 1.0) / 2)
    assert found["math"]["reward"] == {"mean@1": 7.0}


def test_prompts_with_other_numbers_of_responses_have_their_own_metrics():
    found = process_validation_metrics(["s"] * 5, ["p", "p", "q", "q", "q"], {"acc": [1, 0, 1, 1, 1]})["s"]["acc"]
    assert found["mean@2"] == 0.5
    assert found["mean@3"] == 1.0
    assert found["best@2/mean"] == pytest.approx((0.75 + 1.0) / 2)  # both prompts have it


def test_same_seed_same_numbers_and_order_of_variables_does_not_matter():
    rng = np.random.default_rng(0)
    uids = [i // 4 for i in range(40)]
    acc, pred = rng.integers(2, size=40).tolist(), [str(p) for p in rng.integers(3, size=40)]
    first = process_validation_metrics(["s"] * 40, uids, {"acc": acc, "pred": pred})
    second = process_validation_metrics(["s"] * 40, uids, {"pred": pred, "extra": acc, "acc": acc})
    assert first["s"]["acc"] == second["s"]["acc"] == second["s"]["extra"]


def test_booleans_count_and_texts_do_not():
    found = one_prompt(correct=[True, False], note=["x", "y"])
    assert found["correct"]["mean@2"] == 0.5
    assert "note" not in found


def test_bootstrap_metric_is_seeded():
    data = [{"v": 1.0}, {"v": 3.0}]
    mean = [lambda subset: sum(item["v"] for item in subset) / len(subset)]
    assert bootstrap_metric(data, 2, mean) == bootstrap_metric(data, 2, mean)
    ((value, std),) = bootstrap_metric(data, 2, mean, n_bootstrap=4000)
    assert value == pytest.approx(2.0, abs=0.05)
    assert std == pytest.approx(2**-0.5, abs=0.05)
