"""``verl.train``, ``verl.sft``, ``verl.generate`` and ``verl.evaluate``, from objects to results."""

from __future__ import annotations

import json
import math
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.support.waiting import eventually
from verl.api.functions import write_module
from verl.api.result import TrainingResult
from verl.errors import ConfigError
from verl.testing.models import hollow_model_dir, tiny_model_dir

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(2)]
SMALL = {"max_prompt_length": 16, "max_completion_length": 4, "trainer.device": "cpu", "trainer.progress": "off"}


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), family="qwen3")


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    weight = 2.0
    return verl.train(
        model,
        ROWS,
        [lambda solution_str, answer: weight * (answer in solution_str), digits],
        reward_weights=[1.0, 0.5],
        eval_data=ROWS[:2],
        num_generations=2,
        max_steps=2,
        eval_steps=2,
        learning_rate=1e-3,
        output_dir=tmp_path_factory.mktemp("run"),
        **SMALL,
    )


def test_a_run_has_metrics_samples_and_a_model(trained: TrainingResult) -> None:
    assert [row["step"] for row in trained.metrics] == [0, 1, 2]
    assert len(trained.samples) == 2 * 6 * 2  # steps × prompts × responses
    assert len(trained.eval_samples) == 2 * 2  # before and after
    for sample in trained.samples:
        assert sample["score"] == pytest.approx(sample["reward_1"] + 0.5 * sample["digits"])
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    for sample in [*trained.samples, *trained.eval_samples]:
        (answer,) = {answer for prompt, answer in answers.items() if prompt in sample["input"]}
        assert sample["columns"] == {"answer": answer}
    last = [sample["digits"] for sample in trained.samples if sample["step"] == 2]
    assert trained.metrics[-1]["reward/digits/mean"] == pytest.approx(sum(last) / len(last))
    assert (trained.model / "config.json").is_file()


def test_the_trained_model_is_another_and_loads(trained: TrainingResult, model: str) -> None:
    from transformers import AutoModelForCausalLM

    after, tokenizer = trained.load()
    before = AutoModelForCausalLM.from_pretrained(model)
    name, weight = next(iter(after.named_parameters()))
    assert not bool((weight == before.get_parameter(name)).all())
    assert tokenizer.decode(tokenizer("1+1=")["input_ids"]) == "1+1="


def test_the_page_of_a_run_answers_while_python_goes_on(trained: TrainingResult) -> None:
    address = trained.view(wait=False)
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    eventually(lambda: answers(browser, address), "the page answers")
    with browser.open(address.partition("/?")[0] + "/api/runs") as answer:
        assert [run["name"] for run in json.load(answer)["runs"]] == [trained.folder.name]


def answers(browser: urllib.request.OpenerDirector, address: str) -> bool:
    try:
        return browser.open(address).status == 200
    except urllib.error.URLError:
        return False


def test_a_second_call_goes_on_from_the_checkpoint(trained: TrainingResult, model: str) -> None:
    longer = verl.train(
        model, ROWS, lambda solution_str: 0.0, eval_data=ROWS[:2], n=2, max_steps=3, output_dir=trained.folder, **SMALL
    )
    assert [row["step"] for row in longer.metrics] == [0, 1, 2, 3]
    assert longer.metrics[-1]["critic/score/mean"] == 0.0  # the new function, not the one that the run began with
    assert longer.model != trained.model or longer.checkpoint.name == "global_step_3"


def test_responses_and_their_scores(trained: TrainingResult) -> None:
    small = {key: value for key, value in SMALL.items() if key != "trainer.progress"}
    rows = verl.generate(trained, ["1+1=", "2+1="], n=3, **small)
    assert [(row["prompt"], len(row["responses"])) for row in rows] == [("1+1=", 3), ("2+1=", 3)]
    found = verl.evaluate(trained, ROWS, [digits, lambda solution_str: 1 / len(solution_str[:1])], n=2, **small)
    assert (found.prompts, found.responses, found.failed) == (6, 12, 0)
    means = [sum(row["scores"]) / 2 for row in found.rows]
    assert found.mean == pytest.approx(sum(means) / 6)
    assert found.mean == pytest.approx(found.parts["digits"].mean + found.parts["reward_2"].mean)


def test_supervised_training_of_prompts_and_completions(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    small = {key: value for key, value in SMALL.items() if key.startswith("trainer")}
    result = verl.sft(model, rows, learning_rate=1e-2, num_train_epochs=3, max_length=32, output_dir=tmp_path, **small)
    losses = [row["train/loss"] for row in result.metrics]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (result.model / "config.json").is_file()


def test_what_an_argument_decides_is_no_setting(tmp_path: Path) -> None:
    for key in ("data.train_files", "trainer.default_local_dir", "actor_rollout_ref.model.path"):
        with pytest.raises(ConfigError, match="decides it"):
            verl.train("model", ROWS, digits, settings={key: "x"}, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="the call has no reward"):
        verl.train("model", ROWS, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="the call has no reward"):
        verl.evaluate("model", ROWS)
    with pytest.raises(ConfigError, match="reward_funcs of TRL is the argument reward here"):
        verl.train("model", ROWS, reward_funcs=digits, output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"is list\. Give a dict"):
        verl.train("model", ROWS, digits, settings=["n=2"], output_dir=tmp_path)  # pyright: ignore
    with pytest.raises(ConfigError, match="Give a list of classes"):
        verl.train("model", ROWS, digits, environments="Stairs", output_dir=tmp_path)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"Give a list: tools=\[f\]"):
        verl.train("model", ROWS, digits, tools=digits, output_dir=tmp_path)  # pyright: ignore
    with pytest.raises(ConfigError, match="needs answer, and eval_data has no such column"):
        verl.train("model", ROWS, lambda solution_str, answer: 1.0, eval_data=[{"prompt": "a"}], output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"needs ground_truth, and no row of data has .* Columns: answer, prompt"):
        verl.train("model", ROWS, lambda solution_str, ground_truth: 1.0, output_dir=tmp_path)


def test_functions_and_what_they_hold_are_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text("")  # of an earlier run
    (tmp_path / "functions.py").chmod(0o644)
    assert stat.S_IMODE(write_module({"digits": digits}, tmp_path).stat().st_mode) == 0o600


def test_a_call_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such column"):
        verl.train("model", ROWS, lambda solution_str, other: 1.0)
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_call_that_is_refused_leaves_the_files_of_another_run(tmp_path: Path) -> None:
    own = tmp_path / "functions.py"
    own.write_text("mine")
    with pytest.raises(ConfigError, match=r"functions\.py would be replaced, and no run wrote it"):
        verl.train("model", ROWS, digits, output_dir=tmp_path)
    (tmp_path / "metrics.jsonl").touch()  # a call began here
    with pytest.raises(ConfigError, match="there is no such key"):
        verl.train("model", ROWS, digits, learning_rte=1, output_dir=tmp_path)
    assert (own.read_text(), (tmp_path / "data/train.jsonl").exists()) == ("mine", False)
    with pytest.raises(ConfigError, match=r"it has no metrics\.jsonl"):
        TrainingResult(tmp_path / "data")


def test_values_that_were_not_finite_are_nan_in_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"actor/loss": null, "actor/entropy": 0.5}}\n')
    (step,) = TrainingResult(tmp_path).metrics
    assert math.isnan(step.pop("actor/loss"))
    assert step == {"step": 1, "actor/entropy": 0.5}


def test_mistakes_are_told_before_a_model_loads(tmp_path: Path) -> None:
    hollow = hollow_model_dir(tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        verl.train(hollow, ROWS, digits, learning_rte=1, top_p=2.0, output_dir=tmp_path / "run", **SMALL)
    assert "learning_rte=1: there is no such key" in str(error.value)
    assert "actor_rollout_ref.rollout.top_p=2.0" in str(error.value)
    with pytest.raises(ConfigError, match="needs answr, and data has no such column"):
        verl.train(hollow, ROWS, lambda solution_str, answr: 1.0, output_dir=tmp_path / "run", **SMALL)
    with pytest.raises(ConfigError, match="model is int"):
        verl.train(3, ROWS, digits, output_dir=tmp_path / "run", **SMALL)  # pyright: ignore
