"""The naive reward manager: where scores land, what is reported, when a run stops."""

import logging
import math

import numpy as np
import pytest
import torch

from tests.datasets.test_rl_dataset import jsonl
from tests.workers.reward_manager.batches import LENGTH, TOKENIZER, batch_of
from tests.workers.reward_manager.hostile import length_of
from verl.datasets import RLHFDataset
from verl.errors import ConfigError, DataError, RewardError, SchemaError
from verl.scorers import UnknownDataSourceError, scorer_for_all
from verl.trainer.config import DataConfig
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.scores import on_last_token


def manager(function=length_of, **changes):
    return NaiveRewardManager(TOKENIZER, 0, function, **changes)


def test_scores_sit_on_the_last_token_and_an_empty_response_has_none():
    # "ab" is a, b, <eos>; "abcdef" fills all places and loses its <eos>.
    result = manager()(batch_of(["ab", "", "abcdef"]), return_dict=True)
    expected = torch.tensor([[0, 0, 0.2, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0.6]])
    torch.testing.assert_close(result["reward_tensor"], expected)
    assert result["reward_tensor"].dtype == torch.float32
    assert result["reward_extra_info"] == {"score": [0.2, 0.0, 0.6], "reward_status": ["ok", "ok", "ok"]}
    torch.testing.assert_close(manager()(batch_of(["ab", "", "abcdef"])), expected)


def test_the_score_of_an_empty_response_is_reported():
    result = manager(lambda solution_str: 0.5)(batch_of([""]), return_dict=True)
    assert result["reward_tensor"].sum() == 0
    assert result["reward_extra_info"]["score"] == [0.5]


def test_on_last_token_skips_tokens_of_tools():
    # The last token that the policy chose, not the last one that is there.
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert on_last_token(mask, [1.0, 2.0, 3.0]).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 3]]


def test_default_scorers_by_data_source():
    data = batch_of(["#### 3", "#### 4"], ["3", "3"], "openai/gsm8k")
    assert manager(None)(data).sum(-1).tolist() == [1.0, 0.0]
    assert manager(None, format_score=0.5)(data).sum(-1).tolist() == [1.0, 0.5]


def test_another_column_chooses_the_scorer():
    data = batch_of(["#### 3"], ["3"], "?", source=["openai/gsm8k"])
    assert manager(None, reward_fn_key="source")(data).sum() == 1.0


def test_an_unknown_source_and_a_missing_column_stop_at_once():
    with pytest.raises(UnknownDataSourceError, match="'nobody'"):
        manager(None, max_error_rate=1.0)(batch_of(["a"], ["b"], "nobody"))
    with pytest.raises(SchemaError, match="reward_model"):
        manager(None)(batch_of(["a"], None, "openai/gsm8k"))
    with pytest.raises(SchemaError, match="attention_mask"):
        manager()(batch_of(["a"]).select(batch_keys=["responses", "prompts", "response_mask"]))


def test_a_wrong_setting_stops_at_once():
    with pytest.raises(ConfigError, match="format_scor"):
        manager(None, format_scor=1, max_error_rate=1.0)(batch_of(["a"], ["b"], "openai/gsm8k"))
    with pytest.raises(ConfigError, match="takes no weight"):
        manager(weight=1)


def test_dict_results_become_columns():
    def score(solution_str, extra_info):
        extra = {"acc": solution_str == "a"} if extra_info["row"] != 1 else {}
        return {"score": 1.0, **extra}

    extra = manager(score)(batch_of(["a", "b", "c"]), return_dict=True)["reward_extra_info"]
    assert extra == {"acc": [True, None, False], "score": [1.0] * 3, "reward_status": ["ok"] * 3}


def test_extra_info_has_what_the_rollout_knows_and_the_batch_keeps_its_own():
    failures = [{}, {"malformed_call": 1}]
    data = batch_of(
        ["a", "b"],
        __num_turns__=[2, 4],
        rm_scores=torch.full((2, LENGTH), 0.5),
        tool_rewards=[[0.5], [None, -0.25]],
        tool_call_counts=[1, 1],
        tool_failures=failures,
    )
    result = manager(lambda solution_str, extra_info: {"score": 0.0, "seen": extra_info})(data, return_dict=True)
    first, second = result["reward_extra_info"]["seen"]
    beside = {"num_turns": 2, "rm_score": 3.0, "tool_rewards": [0.5], "tool_call_counts": 1, "tool_failures": {}}
    assert first == {"row": 0, "last_turn_str": "a", "conversation_str": "a"} | beside
    beside = {"num_turns": 4, "rm_score": 3.0, "tool_rewards": [None, -0.25], "tool_call_counts": 1}
    texts = {"last_turn_str": "b", "conversation_str": "b"}
    assert second == {"row": 1, "tool_failures": {"malformed_call": 1}} | texts | beside
    assert data.non_tensor_batch["extra_info"].tolist() == [{"row": 0}, {"row": 1}]


# ---- failures ------------------------------------------------------------------------------------


def fails_on(*bad):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str in bad:
            raise KeyError("difficulty")
        return {"score": 1.0, "acc": 1}

    return compute_score


def test_a_failed_sample_is_marked_counted_and_shown(caplog):
    data = batch_of(["a", "b", "c", "d"])
    result = manager(fails_on("b"), max_error_rate=0.25)(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert result["reward_extra_info"]["reward_status"] == ["ok", "error", "ok", "ok"]
    assert result["reward_extra_info"]["acc"] == [1, None, 1, 1]
    (record,) = caplog.records
    for part in ("1 of 4", "25.0%", "u1", "countdown", "KeyError: 'difficulty'", "test_naive.py"):
        assert part in record.getMessage()


def test_above_the_rate_the_run_stops_with_the_first_traceback():
    with pytest.raises(RewardError) as caught:
        manager(fails_on("b", "c"), max_error_rate=0.25)(batch_of(["a", "b", "c", "d"]))
    for part in ("2 of 4", "50.0%", "sample u1", "'countdown'", "KeyError: 'difficulty'", "max_error_rate=0.25"):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_score_that_is_no_finite_number_is_a_failure(value):
    result = manager(lambda solution_str: value, max_error_rate=1.0)(batch_of(["a"]), return_dict=True)
    assert result["reward_extra_info"] == {"score": [0.0], "reward_status": ["error"]}
    assert result["reward_tensor"].sum() == 0


# ---- reward models -------------------------------------------------------------------------------


def test_scores_of_a_reward_model_count_where_no_rule_was_chosen():
    rm_scores = torch.zeros(2, LENGTH)
    rm_scores[0, 2], rm_scores[1, 1] = 1.5, -0.5
    data = batch_of(["ab", "c"], rm_scores=rm_scores)
    result = manager(None)(data, return_dict=True)
    assert torch.equal(result["reward_tensor"], rm_scores)
    assert result["reward_extra_info"]["score"] == [1.5, -0.5]
    assert manager(length_of)(data).sum(-1).tolist() == pytest.approx([0.2, 0.1])


def test_a_reward_model_that_returns_nan_is_a_failure():
    data = batch_of(["ab"], rm_scores=torch.full((1, LENGTH), float("nan")))
    with pytest.raises(RewardError, match="not a finite number"):
        manager(None)(data)


# ---- reports, checks, registry -------------------------------------------------------------------


def test_examples_of_each_source_are_logged(caplog):
    caplog.set_level(logging.INFO)
    data = batch_of(["one", "two", "tri"], ["x", "y", "z"], ["s", "s", "t"], prompt="ask")
    NaiveRewardManager(TOKENIZER, 1, length_of)(data)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0] == "[s]\n[prompt] ask\n[response] one\n[ground_truth] x\n[score] 0.3"
    assert "tri" in messages[1]


def test_data_is_checked_before_a_run(tmp_path):
    def dataset(*records):
        config = DataConfig(max_prompt_length=20)
        return RLHFDataset(jsonl(tmp_path / "x.jsonl", records), TOKENIZER, config)

    good = {"prompt": "a", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "3"}}
    manager(None).check_dataset(dataset(good))
    with pytest.raises(DataError, match="no column 'reward_model'"):
        manager(None).check_dataset(dataset({"prompt": "a", "data_source": "openai/gsm8k"}))
    with pytest.raises(DataError, match=r"no column 'data_source' \(reward_fn_key\)"):
        manager(None).check_dataset(dataset({"prompt": "a", "reward_model": {}}))
    with pytest.raises(UnknownDataSourceError, match="'openai/gsm9k'"):
        manager(None).check_dataset(dataset(good, good | {"data_source": "openai/gsm9k"}))
    for source, truth in (("openai/gsm8k", "five"), ("openai/gsm8k", math.nan), ("countdown", "3"), ("math_dapo", []),
                          ("searchR1_nq", 3), ("apps", {"inputs": ["1"], "outputs": []})):  # fmt: skip
        other = {"data_source": source, "reward_model": {"ground_truth": truth}}
        with pytest.raises(DataError, match=rf"1 of 2 rows .* cannot read\..*x\.jsonl, row 1, scorer of '{source}'"):
            manager(None).check_dataset(dataset(good, good | other))
    judged_inside = {"assert_case": ["assert f(1) == 2", "assert f(1) - 2 == 0", "assert not f(1) - 2"]}
    program = {"data_source": "apps", "reward_model": {"ground_truth": judged_inside}}
    with pytest.raises(DataError, match=r"2 of 3 rows .* cannot read \(4 tests of programs\)\..* 2 of 3 tests"):
        manager(None).check_dataset(dataset(good, good | program, good | program))
    of_all = manager(scorer_for_all("math_reward"))
    of_all.check_dataset(dataset({"prompt": "a", "reward_model": {"ground_truth": "x+1"}}))
    with pytest.raises(DataError, match=r"1 of 2 rows .* row 1, scorer of 'math_reward': .*no value: nan"):
        of_all.check_dataset(dataset(good, good | {"reward_model": {"ground_truth": math.nan}}))
    manager(scorer_for_all("llm_judge")).check_dataset(dataset({"prompt": "a"}))
    for truth in (
        {"reward_model": {"style": "rule"}},
        {"reward_model": {"ground_truth": None}},
        {"reward_model": None},
    ):
        with pytest.raises(DataError, match=r"2 of 3 rows have no reward_model.ground_truth.* is .*x\.jsonl, row 1"):
            manager(None).check_dataset(dataset(good, good | truth, good | truth))


def test_a_function_gets_the_columns_that_it_names(tmp_path, caplog):
    def dataset(*records):
        return RLHFDataset(jsonl(tmp_path / "x.jsonl", records), TOKENIZER, DataConfig(max_prompt_length=20))

    def of_column(solution_str, answer, prompt, level=7):
        return {"score": float(solution_str == answer), "asked": prompt[0]["content"], "level": level}

    def with_default(solution_str, ground_truth=None):
        return 0.0

    rows = dataset({"prompt": "a", "answer": "one", "images": []}, {"prompt": "b", "answer": "no"})
    manager(of_column).check_dataset(rows)
    manager(with_default).check_dataset(rows)
    for function, says in (
        (lambda solution_str, anwser: 0.0, "needs anwser, which is no column of the data. Did you mean 'answer'?"),
        (lambda solution_str, images: 0.0, "needs images, which is no column"),
    ):
        with pytest.raises(ConfigError) as caught:
            manager(function).check_dataset(rows)
        assert says in str(caught.value)

    def truth(solution_str, ground_truth):
        return float(ground_truth)

    half = dataset({"prompt": "a", "answer": "x", "level": 2}, {"prompt": "b"}, {"prompt": "c", "level": 2})
    with pytest.raises(DataError, match=r"2 of 3 rows have no value in the column answer.* the first is .*, row 1\."):
        manager(of_column).check_dataset(half)
    manager(truth).check_dataset(dataset({"prompt": "a"}, {"prompt": "b", "ground_truth": "4"}))
    assert "1 of 2 rows have no ground truth; the first is" in caplog.text
    with pytest.raises(DataError, match=r"truth\(.* needs the ground truth, and none of the 2 rows has one"):
        manager(truth).check_dataset(rows)
    manager(truth).check_dataset(dataset({"prompt": "a"}, {"prompt": "a", "reward_model": {"ground_truth": 0}}))
    manager(truth).check_dataset(dataset({"prompt": "a", "ground_truth": "x"}))

    prompts = [[{"role": "user", "content": text}] for text in ("a", "b")]
    columns = {"answer": ["one", "no"], "raw_prompt": prompts, "ground_truth": ["3", "4"], "level": [None, 2]}
    batch = batch_of(["one", "two"], **{name: np.fromiter(v, dtype=object, count=2) for name, v in columns.items()})
    extra = manager(of_column)(batch, return_dict=True)["reward_extra_info"]
    assert (extra["score"], extra["asked"], extra["level"]) == ([1.0, 0.0], ["a", "b"], [7, 2])

    assert manager(truth)(batch, return_dict=True)["reward_extra_info"]["score"] == [3.0, 4.0]


def test_registry():
    assert get_reward_manager_cls("naive") is NaiveRewardManager
    with pytest.raises(ConfigError, match=r"'nave'.*Did you mean 'naive'"):
        get_reward_manager_cls("nave")
    with pytest.raises(ConfigError, match="registered twice"):
        register("naive")(type("Other", (NaiveRewardManager,), {}))
