from __future__ import annotations

import json

import pytest

from verl.errors import ConfigError, DataError, RewardError
from verl.trainer.config import EvalConfig, load_config
from verl.trainer.evaluation import summarize
from verl.trainer.main_eval import evaluate, run_eval
from verl.trainer.ppo.validation import validation_metrics
from verl.workers.reward_manager.scores import Score

ROWS = [
    {"responses": ["#### 7", "#### 8"], "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}},
    {"responses": ["#### 1", "no"], "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}},
    {"responses": ["\\boxed{3}"], "data_source": "lighteval/MATH", "reward_model": {"ground_truth": "3"}},
]


def config_for(path, rows, **settings) -> EvalConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config({"data": {"path": str(path)}, **settings}, EvalConfig)


def test_means_by_hand(tmp_path, capsys):
    config = config_for(tmp_path / "r.jsonl", ROWS)
    # gsm8k: prompt 0 has one of two right, prompt 1 none: mean (1/2 + 0)/2 = 1/4, best (1 + 0)/2 = 1/2.
    expected = {
        "test_score/lighteval/MATH": 1.0,
        "prompts/lighteval/MATH": 1,
        "responses/lighteval/MATH": 1,
        "test_score/openai/gsm8k": 0.25,
        "test_score_best/openai/gsm8k": 0.5,
        "test_score_std_err/openai/gsm8k": 0.25,  # of 1/2 and 0: deviation sqrt(1/8), over sqrt(2)
        "prompts/openai/gsm8k": 2,
        "responses/openai/gsm8k": 4,
        "reward/error_rate": 0.0,
    }
    assert evaluate(config) == pytest.approx(expected)
    run_eval(config)
    written = capsys.readouterr()
    assert json.loads(written.out) == pytest.approx(expected)
    assert written.err == "5 of 5 responses scored\n"


def test_other_numbers_of_the_function_are_kept():
    def score(value: float, **extra: object) -> Score:
        return Score(value, extra={"score": value, **extra})

    groups = [
        ("s", [score(1.0, acc=True, form=0.5, note="x"), score(0.0, acc=False, form=1.0), Score.failed("timeout", "")]),
        ("s", [score(1.0, acc=True, form=float("nan"))]),
    ]
    # acc: (1/2 + 1)/2; form: the prompts' means are 3/4 and none.
    found = summarize(groups)
    assert (found["test_acc/s"], found["test_form/s"]) == (0.75, 0.75)
    assert not any("note" in name for name in found)
    assert found["test_score_std_err/s"] == pytest.approx(0.25)  # of 1/2 and 1
    assert (found["prompts/s"], found["responses/s"]) == (2, 4)


def own_function(tmp_path, text, **settings):
    (tmp_path / "own.py").write_text(text)
    return {"custom_reward_function": {"path": str(tmp_path / "own.py"), **settings}}


def test_a_function_of_ones_own_and_its_failures(tmp_path, caplog):
    text = (
        "def score(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    return {'score': scale * len(solution_str) / (len(solution_str) - 2)}\n"
    )
    own = own_function(tmp_path, text, name="score", reward_kwargs={"scale": 3.0})
    config = config_for(tmp_path / "r.jsonl", ROWS[:2], **own)
    # "#### 7" has 6 letters: 3·6/4 = 4.5; "no" has 2: a division by zero, one of four, and in no mean.
    assert evaluate(config) == {
        "test_score/openai/gsm8k": 4.5,
        "test_score_best/openai/gsm8k": 4.5,
        "test_score_std_err/openai/gsm8k": 0.0,
        "prompts/openai/gsm8k": 2,
        "responses/openai/gsm8k": 4,
        "reward/error_rate": 0.25,
    }
    assert "1 of 4 responses could not be scored" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_rows_for_a_function_of_ones_own_need_no_data_source(tmp_path):
    rows = [{"responses": ["5", "4"], "reward_model": {"ground_truth": "5"}}]
    own = own_function(
        tmp_path, "def compute_score(solution_str, ground_truth, **_): return solution_str == ground_truth"
    )
    assert evaluate(config_for(tmp_path / "r.jsonl", rows, **own))["test_score/unknown"] == 0.5
    with pytest.raises(DataError, match="no column 'data_source'"):
        evaluate(config_for(tmp_path / "r.jsonl", rows))


def test_a_function_gets_the_columns_that_it_names_as_in_training(tmp_path):
    text = (
        "def compute_score(solution_str, label, prompt, hint='none'):\n"
        "    return {'score': solution_str == label, 'asked': len(prompt[0]['content']), 'hinted': hint == 'h'}\n"
    )
    rows = [{"responses": ["5", "4"], "prompt": "2+3", "label": "5", "hint": "h"}]
    metrics = evaluate(config_for(tmp_path / "r.jsonl", rows, **own_function(tmp_path, text)))
    assert (metrics["test_score/unknown"], metrics["test_asked/unknown"], metrics["test_hinted/unknown"]) == (0.5, 3, 1)
    renamed = config_for(tmp_path / "s.jsonl", [{"responses": ["5"], "lable": "5"}], **own_function(tmp_path, text))
    with pytest.raises(ConfigError, match=r"needs label, which is no column of the data(.|\n)*Columns: .*lable"):
        evaluate(renamed)


def test_a_ground_truth_that_no_row_has_is_told_before_anything_is_scored(tmp_path):
    own = own_function(tmp_path, "def compute_score(solution_str, ground_truth): return ground_truth.lower() == 'a'")
    rows = [{"responses": ["a"], "label": "A", "reward_model": "A"}]
    with pytest.raises(DataError, match=r"none of the 1 rows has one (.|\n)*columns: responses, label"):
        evaluate(config_for(tmp_path / "r.jsonl", rows, **own))
    assert evaluate(config_for(tmp_path / "s.jsonl", [{**rows[0], "ground_truth": "A"}], **own))["test_score/unknown"]


def test_means_are_those_of_validation():
    values = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.25, 0.0, 0.0], [1.0] * 4, [0.5] * 4]
    failed = [(0, 1), (0, 2), (1, 0), *((3, place) for place in range(4))]
    scores = [
        [Score.failed("timeout", "late") if (row, place) in failed else Score(value) for place, value in enumerate(of)]
        for row, of in enumerate(values)
    ]
    # Means of what was scored: (1 + 1)/2, (0.25 + 0 + 0)/3, 1; the last prompt has none.
    assert summarize([("s", of_prompt) for of_prompt in scores])["test_score/s"] == pytest.approx((1 + 1 / 12 + 1) / 3)
    flat = [score for of_prompt in scores for score in of_prompt]
    columns = {"reward": [score.value for score in flat], "reward_status": [score.status for score in flat]}
    found = validation_metrics(["s"] * 16, [number // 4 for number in range(16)], columns)
    assert found["val-core/s/reward/mean@4"] == pytest.approx((1 + 1 / 12 + 1) / 3)


def test_if_nothing_can_be_scored_the_first_error_is_shown(tmp_path):
    own = own_function(tmp_path, "def compute_score(solution_str):\n    return 1 / 0\n")
    with pytest.raises(RewardError, match=r"none of the 5 responses(.|\n)*ZeroDivisionError"):
        evaluate(config_for(tmp_path / "r.jsonl", ROWS, **own))


def test_a_ground_truth_that_cannot_be_read_is_an_error_of_its_row(tmp_path):
    rows = [ROWS[0], {**ROWS[1], "reward_model": {"ground_truth": "two"}}]
    with pytest.raises(DataError, match=r"row 1: the scorer of 'openai/gsm8k' cannot read .*'two'"):
        evaluate(config_for(tmp_path / "r.jsonl", rows))


def test_a_function_of_batches_is_refused(tmp_path):
    own = own_function(tmp_path, "def compute_score(data):\n    return data\n")
    with pytest.raises(ConfigError, match="main_eval has texts"):
        evaluate(config_for(tmp_path / "r.jsonl", ROWS, **own))


def test_a_file_without_responses_is_refused(tmp_path):
    rows = [{key: value for key, value in ROWS[0].items() if key != "responses"}]
    with pytest.raises(DataError, match=r"no column 'responses' \(data.response_key\)"):
        evaluate(config_for(tmp_path / "a.jsonl", rows))
    for wrong in ("one text", [], None):
        with pytest.raises(DataError, match=r"row 1: column 'responses' is .*Expected a list"):
            evaluate(config_for(tmp_path / "b.jsonl", [ROWS[0], {**ROWS[1], "responses": wrong}]))
