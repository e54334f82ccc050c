from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch

from verl.errors import ConfigError, DataError
from verl.testing.models import tiny_model, tiny_model_dir, tiny_tokenizer
from verl.trainer.config import GenerationConfig, load_config
from verl.trainer.main_generation import run_generation, write_rows

QUESTIONS = ["1 + 2?", "What is 40 + 2?", "9?"]


def config_for(tmp_path, model, controller="local", **changes):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": q}], "extra": {"i": i}} for i, q in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(path), "output_path": str(tmp_path / "out.parquet"), "n_samples": 2, "batch_size": 2}
    rollout = {"dtype": "float32", "prompt_length": 24, "response_length": 8}
    tree = {
        "trainer": {"controller": controller, "n_gpus_per_node": 1, "device": "cpu"},
        "data": data | changes.pop("data", {}),
        "model": {"path": model},
        "rollout": rollout | changes.pop("rollout", {}),
    }
    return load_config(tree, GenerationConfig)


def responses_of(config):
    run_generation(config)
    return pq.read_table(config.data.output_path).to_pylist()


def test_rows_come_back_with_their_responses_whatever_the_batch(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    rows = responses_of(config_for(tmp_path, model))
    assert [row["extra"]["i"] for row in rows] == [0, 1, 2]
    assert [row["prompt"][0]["content"] for row in rows] == QUESTIONS
    assert all(len(row["responses"]) == 2 and row["responses"][0] != row["responses"][1] for row in rows)
    assert responses_of(config_for(tmp_path, model, data={"batch_size": 3})) == rows
    assert responses_of(config_for(tmp_path, model, rollout={"seed": 2})) != rows


@torch.no_grad()
def test_greedy_responses_are_those_of_the_model(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    path = tiny_model_dir(tmp_path / "model")
    config = config_for(
        tmp_path, path, data={"n_samples": 1, "output_path": str(tmp_path / "x" / "out.jsonl")},
        rollout={"do_sample": False},
    )  # fmt: skip
    run_generation(config)
    rows = [json.loads(line) for line in (tmp_path / "x" / "out.jsonl").read_text().splitlines()]
    for row, question in zip(rows, QUESTIONS, strict=True):
        ids = tokenizer(f"<user>{question}<assistant>", add_special_tokens=False)["input_ids"]
        chosen: list[int] = []
        while len(chosen) < 8 and 1 not in chosen:
            chosen.append(int(model(torch.tensor([ids + chosen])).logits[0, -1].argmax()))
        assert row["responses"] == [tokenizer.decode(chosen, skip_special_tokens=True)]


@pytest.mark.slow
def test_on_ray_two_ranks_give_what_one_rank_gives(tmp_path, ray_cluster):
    model = tiny_model_dir(tmp_path / "model")
    alone = responses_of(config_for(tmp_path, model))
    config = config_for(tmp_path, model, controller="ray")
    trainer = {"controller": "ray", "n_gpus_per_node": 2, "device": "cpu"}
    two = load_config({**config.to_dict(), "trainer": trainer}, GenerationConfig)
    assert responses_of(two) == alone


def test_a_prompt_that_is_too_long_is_refused_before_any_worker_starts(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    with pytest.raises(DataError, match=r"row 1: the prompt has 17 tokens, more than rollout.prompt_length=16"):
        run_generation(config_for(tmp_path, model, rollout={"prompt_length": 16}))


def test_the_name_of_the_output_says_its_format(tmp_path):
    with pytest.raises(DataError, match=r"must end in .parquet or .jsonl"):
        write_rows(tmp_path / "out.csv", [{"responses": ["a"]}])
    with pytest.raises(DataError, match=r"Let data.output_path end in .jsonl"):
        write_rows(tmp_path / "out.parquet", [{"x": 1}, {"x": "a"}])
    write_rows(tmp_path / "out.jsonl", [{"x": 1}, {"x": "a"}])
    assert (tmp_path / "out.jsonl").read_text() == '{"x": 1}\n{"x": "a"}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_no_chat_template_is_said(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        run_generation(config_for(tmp_path, model))
