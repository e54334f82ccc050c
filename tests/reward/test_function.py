"""The two forms of a reward function, and what becomes of its results and failures."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from tests.reward.batches import LENGTH, batch_of
from verl.errors import ConfigError, RewardError
from verl.workers.reward_manager.function import RewardFunction, Sample, form_of, to_score, token_scores

SAMPLES = [Sample("a", "xx", "2", {"n": 1}, "u0"), Sample("b", "yyy", "3", {"n": 2}, "u1")]


def full(data_source, solution_str, ground_truth, extra_info): ...
def full_kwargs(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def short(solution_str, ground_truth): ...
def extra(data_source, solution_str, ground_truth, extra_info, weight): ...
async def waits(data_source, solution_str, ground_truth, extra_info): ...
def whole(data, **kwargs): ...
def whole_weight(data, weight=1.0): ...
def old_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def other(x, y): ...


@pytest.mark.parametrize(
    "function, bound, form",
    [
        (full, {}, "sample"),
        (full_kwargs, {"anything": 1}, "sample"),
        (short, {}, "sample"),
        (extra, {"weight": 2}, "sample"),
        (functools.partial(extra, weight=2), {}, "sample"),
        (waits, {}, "sample"),
        (whole, {"anything": 1}, "batch"),
        (whole_weight, {"weight": 2}, "batch"),
    ],
)
def test_forms_are_told_apart_by_parameter_names(function, bound, form):
    assert form_of(function, bound) == form


@pytest.mark.parametrize(
    "function, bound, says",
    [
        (other, {}, "other(x, y) has neither 'solution_str' nor 'data'"),
        (old_batch, {}, "has neither"),
        (extra, {}, "needs weight, which nobody gives"),
        (full, {"weight": 2}, "takes no weight"),
        (functools.partial(other, y=1), {}, "other(x, *, y=1) has neither"),
    ],
)
def test_another_form_is_refused_with_both_forms(function, bound, says):
    with pytest.raises(ConfigError) as caught:
        form_of(function, bound)
    assert says in str(caught.value)
    if "takes no" not in says:
        assert "(data_source, solution_str, ground_truth, extra_info, **kwargs)" in str(caught.value)
        assert "(data: DataProto, **kwargs)" in str(caught.value)


def test_each_sample_gets_its_own_arguments():
    def score(data_source, solution_str, ground_truth, extra_info, weight):
        return {"score": len(solution_str) * weight, "what": f"{data_source}{ground_truth}{extra_info['n']}"}

    scores = RewardFunction(score, {"weight": 10}).score_samples(SAMPLES)
    assert [(s.value, s.extra, s.error) for s in scores] == [
        (20.0, {"what": "a21"}, None),
        (30.0, {"what": "b32"}, None),
    ]


def test_a_function_gets_only_what_it_names():
    def score(solution_str, ground_truth):
        return float(len(solution_str) == int(ground_truth))

    assert [s.value for s in RewardFunction(score, {}).score_samples(SAMPLES)] == [1.0, 1.0]


def test_kwargs_alone_get_all_four():
    seen = []
    RewardFunction(lambda solution_str, **kwargs: seen.append(kwargs) or 0.0, {"w": 1}).score_samples(SAMPLES[:1])
    assert seen == [{"data_source": "a", "ground_truth": "2", "extra_info": {"n": 1}, "w": 1}]


def test_async_functions_run_side_by_side_within_the_bound():
    running, most = 0, 0

    async def score(data_source, solution_str, ground_truth, extra_info):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        if solution_str == "3":
            raise ValueError("three")
        return float(solution_str)

    samples = [Sample("a", str(n), "", {}) for n in range(10)]
    scores = RewardFunction(score, {}, max_concurrent=4).score_samples(samples)
    assert most == 4
    assert [s.value for s in scores] == [0, 1, 2, 0, 4, 5, 6, 7, 8, 9]
    assert [s.error is not None for s in scores] == [n == 3 for n in range(10)]
    assert "ValueError: three" in scores[3].error


def test_a_failure_concerns_its_sample_alone_and_keeps_its_traceback():
    def score(data_source, solution_str, ground_truth, extra_info):
        return 1 / (extra_info["n"] - 1)

    first, second = RewardFunction(score, {}).score_samples(SAMPLES)
    assert (first.value, second.value, second.error) == (0.0, 1.0, None)
    assert "ZeroDivisionError" in first.error
    assert "test_function.py" in first.error
    assert "1 / (extra_info" in first.error


def test_configuration_errors_and_interrupts_pass_through():
    for error in (ConfigError("wrong"), KeyboardInterrupt()):

        def score(solution_str, error=error):
            raise error

        with pytest.raises(type(error)):
            RewardFunction(score, {}).score_samples(SAMPLES)


@pytest.mark.parametrize(
    "result, value",
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (torch.tensor(0.25), 0.25),
        (-3, -3.0),
    ],
)
def test_numbers_of_every_kind(result, value):
    for form in (result, {"score": result}):
        score = to_score(form)
        assert score.value == value
        assert type(score.value) is float


def test_extra_values_become_plain():
    assert to_score({"score": 1, "acc": np.bool_(True), "len": torch.tensor(3), "pred": "x"}).extra == {
        "acc": True,
        "len": 3,
        "pred": "x",
    }


@pytest.mark.parametrize(
    "result, says",
    [
        (None, "NoneType None, not a number"),
        ("1", "str '1', not a number"),
        ((1.0, "x"), "tuple"),
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        (torch.tensor(float("nan")), "nan"),
        (torch.ones(2), "Tensor"),
        (1j, "complex"),
        ({"acc": 1}, "without 'score'; it has: acc"),
        ({"score": None}, "NoneType"),
        ({"score": 1.0, "reward_status": "fine"}, "reward_status"),
    ],
)
def test_what_is_no_score(result, says):
    with pytest.raises(RewardError) as caught:
        to_score(result)
    assert says in str(caught.value)


# ---- the per-batch form --------------------------------------------------------------------------


def test_batch_form_sees_texts_truths_and_columns():
    data = batch_of(["ab", "c"], ["ab", "x"])

    def compute_reward(data, **kwargs):
        assert len(data.batch) == len(data) == 2
        assert data.non_tensor_batch["uid"].tolist() == ["u0", "u1"]
        assert data.batch["responses"].shape == (2, LENGTH)
        return torch.tensor([float(r == t) for r, t in zip(data.responses, data.ground_truth_answers, strict=True)])

    samples = [Sample("s", "ab", "ab", {}), Sample("s", "c", "x", {})]
    scores, tokens = RewardFunction(compute_reward, {}).score_batch(data, samples)
    assert [s.value for s in scores] == [1.0, 0.0]
    assert tokens is None
    assert isinstance(data.responses, torch.Tensor)  # the batch itself is as it was


def test_batch_form_with_token_scores():
    data = batch_of(["ab", ""], ["", ""])  # the first has a, b, <eos>
    scores, tokens = RewardFunction(lambda data: torch.ones(2, LENGTH) / 4, {}).score_batch(data, SAMPLES)
    assert tokens.tolist() == [[0.25, 0.25, 0.25, 0, 0, 0], [0.0] * 6]
    assert [s.value for s in scores] == [0.75, 0.0]


@pytest.mark.parametrize(
    "result, says",
    [
        (torch.ones(3), "shape (3,); expected (2,), one score per sample, or (2, 6), one per token"),
        (torch.ones(2, 5), "shape (2, 5)"),
        (torch.ones(2, 1), "shape (2, 1)"),
        ([1.0, 0.0], "returned list, not a torch.Tensor"),
    ],
)
def test_batch_form_of_another_shape_fails_every_sample(result, says):
    scores, _ = RewardFunction(lambda data: result, {}).score_batch(batch_of(["a", "b"], ["", ""]), SAMPLES)
    assert all(says in s.error for s in scores)


def test_batch_form_with_nan_fails_that_sample():
    data = batch_of(["a", "b"], ["", ""])
    scores, _ = RewardFunction(lambda data: torch.tensor([1.0, float("nan")]), {}).score_batch(data, SAMPLES)
    assert (scores[0].value, scores[0].error) == (1.0, None)
    assert (scores[1].value, "not a finite number" in scores[1].error) == (0.0, True)


def test_token_scores_outside_the_mask_do_not_count():
    nan = float("nan")
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    scores, tokens = token_scores(torch.tensor([[1.0, 2.0, nan], [nan, 1.0, 5.0]]), mask)
    assert tokens.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert [s.value for s in scores] == [3.0, 0.0]
    assert [s.error is None for s in scores] == [True, False]
