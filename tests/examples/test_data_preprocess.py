"""The scripts that make data: run as a user runs them, and read back as a run reads it."""

import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.data_preprocess import (
    _common,
    countdown,
    gsm8k,
    gsm8k_multiturn_w_interaction,
    gsm8k_multiturn_w_tool,
)
from examples.data_preprocess import math as math_script
from verl.datasets import RLHFDataset
from verl.errors import DataError
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.scorers import default_compute_score
from verl.scorers.countdown import evaluate
from verl.testing.models import tiny_tokenizer
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.trainer.config import DataConfig

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"
SAMPLE = Path(__file__).parents[1] / "datasets" / "gsm8k_sample.jsonl"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call a script's main in an empty folder, with arguments as on the command line."""
    monkeypatch.chdir(tmp_path)

    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        _common.run(module.main)

    return call


def splits(folder):
    return {split: pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def opens(folder):
    config = DataConfig(max_prompt_length=2000)
    return [len(RLHFDataset(str(folder / f"{split}.parquet"), tiny_tokenizer(), config)) for split in ("train", "test")]


def test_gsm8k_from_a_file_and_from_a_folder(tmp_path, run):
    (tmp_path / "raw").mkdir()
    lines = SAMPLE.read_text().splitlines(keepends=True)
    (tmp_path / "raw" / "train.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "raw" / "test.jsonl").write_text("".join(lines[30:]))
    run(gsm8k, "--local_dataset_path", "raw", "--local_save_dir", "out", "--train_size", 25)
    made = splits(tmp_path / "out")
    assert opens(tmp_path / "out") == [25, 10]
    raw = [json.loads(line) for line in lines]
    for row, source in zip(made["test"], raw[30:], strict=True):
        assert row["data_source"] == "openai/gsm8k"
        assert row["prompt"][0]["content"].startswith(source["question"])
        assert row["extra_info"]["answer"] == source["answer"]
        truth = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], source["answer"], truth) == 1.0
    assert [row["extra_info"]["index"] for row in made["train"]] == list(range(25))

    run(gsm8k, "--local_dataset_path", SAMPLE, "--local_dir", "one", "--test_fraction", 0.2)
    made = splits(tmp_path / "one")
    questions = [{row["extra_info"]["question"] for row in made[split]} for split in ("train", "test")]
    assert [len(part) for part in questions] == [32, 8]
    assert not questions[0] & questions[1]

    run(gsm8k_multiturn_w_tool, "--local_dataset_path", SAMPLE, "--local_save_dir", "tool", "--test_fraction", 0.2)
    row = splits(tmp_path / "tool")["test"][0]
    assert (row["agent_name"], row["prompt"][1]["role"]) == ("tool_agent", "user")
    truth = row["reward_model"]["ground_truth"]
    assert row["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
    yaml = SCRIPTS.parent / "agents" / "gsm8k_tool.yaml"
    assert "calc_gsm8k_reward" in {tool.name for tool in initialize_tools_from_config(str(yaml))}

    run(gsm8k_multiturn_w_interaction, "--local_dataset_path", SAMPLE, "--local_save_dir", "user")
    row = splits(tmp_path / "user")["test"][0]
    assert [message["role"] for message in row["prompt"]] == ["user"]
    asks = row["extra_info"]["interaction_kwargs"]
    assert asks["ground_truth"] == row["reward_model"]["ground_truth"]
    yaml = SCRIPTS.parent / "agents" / "gsm8k_interaction.yaml"
    assert asks["name"] in initialize_interactions_from_config(str(yaml))


def test_math_from_json_lines_as_a_command(tmp_path):
    # In a process of its own, because a script called math.py must not hide Python's module of that name.
    rows = [
        {
            "problem": f"What is {n} halves?",
            "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$.",
            "level": "1",
            "type": "x",
        }
        for n in range(10)
    ]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SCRIPTS / "math.py"), "--local_dataset_path", "math.jsonl", "--local_dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = splits(tmp_path / "out")
    assert opens(tmp_path / "out") == [9, 1]
    for row in made["train"] + made["test"]:
        n = int(re.search(r"\d+", row["extra_info"]["question"]).group())
        assert row["reward_model"]["ground_truth"] == rf"\frac{{{n}}}{{2}}"
        assert (
            default_compute_score(row["data_source"], rf"\boxed{{{n}/2}}", row["reward_model"]["ground_truth"]) == 1.0
        )
        assert row["extra_info"]["level"] == "1"


def test_countdown_script(tmp_path, run):
    arguments = ["--train_size", 60, "--test_size", 20, "--max_number", 15, "--seed", 4]
    for folder in ("a", "b"):
        run(countdown, *arguments, "--local_save_dir", folder)
    made = splits(tmp_path / "a")
    assert made == splits(tmp_path / "b")
    assert opens(tmp_path / "a") == [60, 20]
    problems = []
    for row in made["train"] + made["test"]:
        truth = row["reward_model"]["ground_truth"]
        problems.append((tuple(sorted(truth["numbers"])), truth["target"]))
        assert default_compute_score("countdown", f"<answer>{row['extra_info']['answer']}</answer>", truth) == 1.0
        assert str(truth["numbers"]) in row["prompt"][0]["content"]
        assert f"equals {truth['target']}." in row["prompt"][0]["content"]
    assert len(set(problems)) == 80


@pytest.mark.parametrize(
    "module, arguments, says",
    [
        (gsm8k, ["--local_dataset_path", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
        (gsm8k, ["--local_dataset_path", "."], "must hold one train file"),
        (gsm8k, ["--local_dataset_path", "other.jsonl"], "no column 'answer'"),
        (math_script, ["--local_dataset_path", "other.jsonl"], "Its columns: question"),
        (countdown, ["--train_size", "5000", "--num_count", "2", "--max_number", "3"], "different problems"),
        (countdown, ["--operations", "+^"], "must be some of"),
    ],
)
def test_what_is_wrong_is_a_message(tmp_path, run, module, arguments, says):
    (tmp_path / "other.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(SystemExit) as caught:
        run(module, *arguments, "--local_save_dir", "out")
    assert str(caught.value).startswith("error: ")
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 20), st.integers(20, 100))
def test_every_problem_has_its_solution(seed, num_count, max_number, max_target):
    (numbers, target), solution = countdown.make_problem(
        random.Random(seed), num_count, max_number, max_target, countdown.OPERATIONS
    )
    value, used = evaluate(solution)
    assert value == Fraction(target)
    assert sorted(used) == sorted(numbers)
    assert len(numbers) == num_count
    assert 1 <= min(numbers) <= max(numbers) <= max_number
    assert 0 < target <= max_target


def test_operations_can_be_chosen():
    made = countdown.make_problems(50, 1, num_count=3, max_number=9, max_target=100, operations="+")
    assert all(sum(numbers) == target for (numbers, target), _ in made)


def test_too_many_problems():
    # Two numbers of 1 and 2 with +: (1, 1, 2), (1, 2, 3), (2, 2, 4).
    assert len(countdown.make_problems(3, 1, num_count=2, max_number=2, max_target=9, operations="+")) == 3
    with pytest.raises(DataError, match="only 3 different problems"):
        countdown.make_problems(4, 1, num_count=2, max_number=2, max_target=9, operations="+")
