"""The forms of a reward function, and what becomes of its results and failures."""

import asyncio
import functools
import importlib
import time

import numpy as np
import psutil
import pytest
import torch

from tests.workers.reward_manager.batches import batch_of
from verl import DataProto
from verl.errors import ConfigError, RewardError
from verl.scorers import UnknownDataSourceError, default_compute_score, scorer_for_all
from verl.workers.reward_manager.function import RewardFunction, RewardSample, form_of
from verl.workers.reward_manager.scores import on_turns, to_score, token_scores

SAMPLES = [RewardSample("a", "xx", "2", {"n": 1}, "u0"), RewardSample("b", "yyy", "3", {"n": 2}, "u1")]


def full(data_source, solution_str, ground_truth, extra_info): ...
def full_kwargs(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def short(solution_str, ground_truth): ...
def extra(data_source, solution_str, ground_truth, extra_info, weight): ...
async def waits(data_source, solution_str, ground_truth, extra_info): ...
def whole(data, **kwargs): ...
def whole_weight(data, weight=1.0): ...
def whole_needs(data, weight): ...
def judged(solution_str, reward_router_address): ...
def texts(data_sources, solution_strs, ground_truths, extra_infos): ...
def texts_weight(solution_strs, ground_truths, weight, **kwargs): ...
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
        (texts, {}, "texts"),
        (texts_weight, {"weight": 2}, "texts"),
        (extra, {}, "sample"),  # weight is a column
    ],
)
def test_forms_are_told_apart_by_parameter_names(function, bound, form):
    assert form_of(function, bound) == form


@pytest.mark.parametrize(
    "function, bound, says",
    [
        (other, {}, "other(x, y) has neither 'solution_str' nor 'solution_strs' nor 'data'"),
        (texts, {"weight": 2}, "takes no weight"),
        (whole_needs, {}, "needs weight, which it does not receive"),
        (judged, {}, "needs reward_router_address, which it does not receive"),
        (full, {"weight": 2}, "takes no weight"),
        (functools.partial(other, y=1), {}, "other(x, *, y=1) has neither"),
    ],
)
def test_another_form_is_refused_with_all_forms(function, bound, says):
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
    function = RewardFunction(lambda solution_str, **kwargs: {"score": 0.0, "seen": kwargs}, {"w": 1})
    (score,) = function.score_samples(SAMPLES[:1])
    assert score.extra["seen"] == {"data_source": "a", "ground_truth": "2", "extra_info": {"n": 1}, "w": 1}


def of_rows(*columns):
    return [RewardSample("a", "xx", "2", {}, "u0", dict(given)) for given in columns]


def test_parameters_named_like_columns_get_them():
    def score(solution_str, answer, level=1, method="m"):
        return {"score": float(solution_str == answer), "level": level, "method": method}

    first, second = {"answer": "xx", "level": 5, "unnamed": 0}, {"answer": "y", "level": None, "unnamed": 1}
    scores = RewardFunction(score, {}).score_samples(of_rows(first, second))
    assert [(s.value, s.extra["level"], s.extra["method"]) for s in scores] == [(1.0, 5, "m"), (0.0, 1, "m")]
    # What the configuration gives stays, and **kwargs get no columns: functions pass them on to others.
    bound = functools.partial(score, method="bound")
    both = first | {"method": "of the row"}
    assert RewardFunction(bound, {"level": 7}).score_samples(of_rows(both))[0].extra == {"level": 7, "method": "bound"}
    seen = RewardFunction(lambda solution_str, **kwargs: {"score": 0.0, **kwargs}, {}).score_samples(of_rows(both))[0]
    assert set(seen.extra) == {"data_source", "ground_truth", "extra_info"}


def test_lists_of_columns_for_a_whole_batch():
    def score(solution_strs, answer, level=None):
        return [float(text == one) for text, one in zip(solution_strs, answer, strict=True)]

    samples = of_rows({"answer": "xx"}, {"answer": "y"})
    scores = RewardFunction(score, {}).submit_batch(batch_of(["xx", "xx"]), samples).result().samples
    assert [score.value for score in scores] == [1.0, 0.0]


def test_a_parameter_that_no_column_has():
    function = RewardFunction(lambda solution_str, anwser: 0.0, {})
    with pytest.raises(ConfigError, match=r"needs anwser, which is no column of the data. Did you mean 'answer'"):
        function.score_samples(of_rows({"answer": "xx"}))


def test_async_functions_run_side_by_side_within_the_bound():
    running = [0]

    async def score(data_source, solution_str, ground_truth, extra_info):
        running[0] += 1
        seen = running[0]
        await asyncio.sleep(0.05)
        running[0] -= 1
        if solution_str == "3":
            raise ValueError("three")
        return {"score": float(solution_str), "running": seen}

    samples = [RewardSample("a", str(n), "", {}) for n in range(10)]
    scores = RewardFunction(score, {}, max_concurrent=4).score_samples(samples)
    assert max(s.extra.get("running", 0) for s in scores) == 4
    assert [s.value for s in scores] == [0, 1, 2, 0, 4, 5, 6, 7, 8, 9]
    assert [s.status for s in scores] == ["error" if n == 3 else "ok" for n in range(10)]
    assert "ValueError: three" in scores[3].error


def test_a_failure_concerns_its_sample_alone_and_keeps_its_traceback():
    def score(data_source, solution_str, ground_truth, extra_info):
        return 1 / (extra_info["n"] - 1)

    first, second = RewardFunction(score, {}).score_samples(SAMPLES)
    assert (first.value, second.value, second.error) == (0.0, 1.0, None)
    assert "ZeroDivisionError" in first.error
    assert "test_function.py" in first.error
    assert "1 / (extra_info" in first.error


def test_what_is_wrong_for_every_sample_is_raised_once():
    def wrong(solution_str):
        raise ConfigError("format_scor is no setting")

    with pytest.raises(ConfigError, match="format_scor is no setting"):
        RewardFunction(wrong, {}).score_samples(SAMPLES)
    with pytest.raises(UnknownDataSourceError, match="'nobody'"):
        RewardFunction(default_compute_score, {}).score_samples([RewardSample("nobody", "x", "y", {})])


def test_an_interrupt_ends_its_sample_and_not_the_run():
    def score(solution_str):
        if solution_str == "xx":
            raise KeyboardInterrupt
        return 1.0

    assert [s.status for s in RewardFunction(score, {}).score_samples(SAMPLES)] == ["crashed", "ok"]


def test_results_of_every_kind_arrive_as_numbers():
    def score(solution_str):
        values = [np.float32(0.5), np.int64(2), torch.tensor(0.25), np.bool_(True), 1, np.array(3)]
        return {"score": values[int(solution_str)], "list": np.arange(2), "pair": (1, "x"), "none": None}

    scores = RewardFunction(score, {}).score_samples([RewardSample("a", str(n), "", {}) for n in range(6)])
    assert [s.value for s in scores] == [0.5, 2.0, 0.25, 1.0, 1.0, 3.0]
    assert all(type(s.value) is float for s in scores)
    assert scores[0].extra == {"list": [0, 1], "pair": [1, "x"], "none": None}


def test_scorers_that_no_sample_needs_get_no_processes():
    before = set(psutil.Process().children())  # some of them may be about to end
    function = RewardFunction(default_compute_score, {}, num_workers=2)
    assert function.score_samples([RewardSample("gsm8k", "#### 4", "4", {})])[0].value == 1.0
    assert len(set(psutil.Process().children()) - before) == 2  # not four, two of them for async scorers
    function.close()


def test_async_scorers_by_data_source_run_side_by_side(tmp_path, monkeypatch):
    # One source is async, the other is not; each sample gets its own score, in order.
    code = """
import asyncio
from verl.scorers import register_scorer

@register_scorer("test/slow")
async def slow(solution_str, ground_truth):
    await asyncio.sleep(0.5)
    return float(solution_str)

@register_scorer("test/fast")
def fast(solution_str, ground_truth):
    return float(solution_str) * 10
"""
    (tmp_path / "my_scorers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_scorers")
    importlib.import_module("my_scorers")
    function = RewardFunction(default_compute_score, {}, max_concurrent=16)
    samples = [RewardSample("test/fast" if n % 4 == 0 else "test/slow", str(n), "", {}) for n in range(16)]
    function.score_samples(samples[:1])  # the processes start
    started = time.perf_counter()
    assert [s.value for s in function.score_samples(samples)] == [n * 10 if n % 4 == 0 else n for n in range(16)]
    assert time.perf_counter() - started < 6  # one after the other, the twelve slow ones take that long


def test_no_more_timed_scorers_at_once_than_processes(tmp_path, monkeypatch):
    # Both take longer than the patience of the pool. Of the plain one substitutes take others along, for a call that
    # takes so long may be stuck; a verdict by the clock would be another one then. So each of three plain calls may
    # wait for all of them to have begun.
    code = f"""
import os, time
from pathlib import Path
from verl.scorers import register_scorer

@register_scorer("test/timed", is_timed=True)
def timed(solution_str, ground_truth):
    started = time.time()
    time.sleep(0.9)
    return {{"score": 1.0, "started": started, "ended": time.time()}}

@register_scorer("test/plain")
def plain(solution_str, ground_truth):
    folder = Path({str(tmp_path)!r}) / solution_str
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    return 1.0
"""
    (tmp_path / "my_timed_scorers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_timed_scorers")
    importlib.import_module("my_timed_scorers")
    for source in ("test/timed", "test/plain"):
        for name, score in {"by source": default_compute_score, "for all": scorer_for_all(source)}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            function = RewardFunction(score, {}, num_workers=2)
            scores = function.score_samples([RewardSample(source, name, "", {})] * (4 if source == "test/timed" else 3))
            assert [s.value for s in scores] == [1.0] * len(scores)
            if source == "test/timed":
                spans = [s.extra for s in scores]
                at_once = [sum(o["started"] <= span["started"] < o["ended"] for o in spans) for span in spans]
                assert max(at_once) <= 2
            function.close()


@pytest.mark.parametrize(
    "result, value",
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (-3, -3.0),
    ],
)
def test_numbers_of_every_kind(result, value):
    for form in (result, {"score": result}):
        score = to_score(form)
        assert score.value == value
        assert type(score.value) is float


def test_a_score_for_each_turn():
    score = to_score({"turn_scores": [0.5, 0, 1], "acc": True})
    assert (score.value, score.turn_scores, score.extra) == (1.5, (0.5, 0.0, 1.0), {"acc": True})
    assert to_score({"turn_scores": [1.0], "score": 1.0}).value == 1.0
    assert on_turns(score, 3) is score
    failed = on_turns(score, 2)
    assert (failed.value, failed.status) == (0.0, "error")
    assert "3 turn_scores, but the policy had 2 turns" in failed.error


@pytest.mark.parametrize(
    "result, says",
    [
        (None, "NoneType None, not a number"),
        ("1", "str '1', not a number"),
        ((1.0, "x"), "tuple"),
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        ([1.0, 1.0], "list [1.0, 1.0], not a number"),
        ({"turn_scores": 1.0}, "turn_scores=1.0, not a list"),
        ({"turn_scores": [1.0, None]}, "NoneType"),
        ({"turn_scores": [1.0, 2.0], "score": 1.0}, "score=1, and turn_scores whose sum is 3"),
        ({"acc": 1}, "without 'score'; it has: acc"),
        ({"score": None}, "NoneType"),
        ({"score": 1.0, "reward_status": "fine"}, "reward_status"),
    ],
)
def test_what_is_no_score(result, says):
    with pytest.raises(RewardError) as caught:
        to_score(result)
    assert says in str(caught.value)


# ---- the forms for a whole batch -----------------------------------------------------------------


def batch_scores(function, data, samples, **kwargs):
    return RewardFunction(function, kwargs).submit_batch(data, samples).result()


def test_texts_form():
    def score(data_sources, solution_strs, ground_truths, extra_infos, weight):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [{"score": len(text) * weight, "what": f"{s}{t}{e['n']}"} for s, text, t, e in rows]

    scores = batch_scores(score, batch_of(["xx", "yyy"]), SAMPLES, weight=10).samples
    assert [(s.value, s.extra) for s in scores] == [(20.0, {"what": "a21"}), (30.0, {"what": "b32"})]
    some = batch_scores(lambda solution_strs: [1.0, None], batch_of(["xx", "yyy"]), SAMPLES).samples
    assert [s.status for s in some] == ["ok", "error"]


@pytest.mark.parametrize(
    "result, says", [([1.0], "returned 1 scores for 2 samples"), (1.0, "returned float, not a list")]
)
def test_texts_form_of_another_length(result, says):
    scores = batch_scores(lambda solution_strs: result, batch_of(["a", "b"]), SAMPLES).samples
    assert all(says in s.error and s.status == "error" for s in scores)


@pytest.fixture(scope="module")
def per_batch():
    """A function of the per-batch form in one process, which loads PyTorch for all tests of the form."""

    def compute_reward(data, **kwargs):
        case = data.meta_info["case"]
        if case == "raises":
            raise RuntimeError("no")
        if case == "texts":
            assert len(data.batch) == len(data) == 2
            assert data.non_tensor_batch["uid"].tolist() == ["u0", "u1"]
            assert data.batch["responses"].shape == (2, 6)
            assert data.extra_infos == [{"last_turn_str": "ab"}, {}]
            return torch.tensor([float(r == t) for r, t in zip(data.responses, data.ground_truth_answers, strict=True)])
        if case == "tokens":
            return torch.ones(2, 6) / 4
        return [torch.ones(3), torch.ones(2, 5), torch.ones(2, 1), 1.0, torch.tensor([1.0, float("nan")])][case]

    return RewardFunction(compute_reward, {})


def case_of(case, *texts):
    return batch_of(*texts) | DataProto(meta_info={"case": case})


def test_batch_form_sees_texts_truths_and_columns_and_may_score_tokens(per_batch):
    data = case_of("texts", ["ab", "c"], ["ab", "x"])
    samples = [RewardSample("s", "ab", "ab", {"last_turn_str": "ab"}), RewardSample("s", "c", "x", {})]
    scores = per_batch.submit_batch(data, samples).result()
    assert [s.value for s in scores.samples] == [1.0, 0.0]
    assert scores.tokens is None
    assert isinstance(data.responses, torch.Tensor)  # the batch itself is as it was
    data = case_of("tokens", ["ab", ""], ["", ""])  # the first has a, b, <eos>
    scores = per_batch.submit_batch(data, SAMPLES).result()
    assert scores.tokens.tolist() == [[0.25, 0.25, 0.25, 0, 0, 0], [0.0] * 6]
    assert [s.value for s in scores.samples] == [0.75, 0.0]


def test_batch_form_that_raises_or_gives_another_shape_fails_every_sample(per_batch):
    says = {
        "raises": "RuntimeError: no",
        0: "shape (3,); expected (2,), one score per sample, or (2, 6), one per token",
        1: "shape (2, 5)",
        2: "shape (2, 1)",
        3: "returned float, not a torch.Tensor",
    }
    for case, message in says.items():
        scores = per_batch.submit_batch(case_of(case, ["a", "b"], ["", ""]), SAMPLES).result().samples
        assert all(message in s.error and s.status == "error" for s in scores)
    data = case_of(4, ["a", "b"], ["", ""])
    scores = per_batch.submit_batch(data, SAMPLES).result().samples  # NaN concerns its sample alone
    assert (scores[0].value, scores[0].error) == (1.0, None)
    assert (scores[1].value, "not a finite number" in scores[1].error) == (0.0, True)


def test_a_batch_call_has_its_own_time():
    function = RewardFunction(lambda solution_strs: time.sleep(600), {}, batch_timeout_s=0.5)
    scores = function.submit_batch(batch_of(["a", "b"]), SAMPLES).result().samples
    assert [s.status for s in scores] == ["timeout", "timeout"]
    assert "0.5 s" in scores[0].error


def test_token_scores_of_a_tool_count_for_the_turn_before_it():
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    present = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    scores = token_scores(torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0]]).expand(3, -1), mask, present)
    # Padding does not count; what precedes every turn goes to the first; without a turn there is nothing.
    assert scores.tokens.tolist() == [[3, 0, 7, 0, 0], [0, 0, 10, 0, 0], [0, 0, 0, 0, 0]]
    assert [score.value for score in scores.samples] == [10, 10, 0]


def test_token_scores_outside_the_mask_do_not_count():
    nan = float("nan")
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    scores = token_scores(torch.tensor([[1.0, 2.0, nan], [nan, 1.0, 5.0]]), mask)
    assert scores.tokens.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert [s.value for s in scores.samples] == [3.0, 0.0]
    assert [s.error is None for s in scores.samples] == [True, False]
