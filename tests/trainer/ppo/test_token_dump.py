"""Files of tokens: what a row holds, and that a run writes them when they are due."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.feather as feather
import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.token_dump import TokenDump, token_table
from verl.utils import hf_tokenizer


def padded_batch() -> DataProto:
    """Two rows: a prompt of 1 and of 2 tokens; a response of 3 tokens, one of a tool's, and of 1 token."""
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[0, 5, 7, 8, 9], [6, 5, 4, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
            "prompts": torch.tensor([[0, 5], [6, 5]]),
            "responses": torch.tensor([[7, 8, 9], [4, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
            "advantages": torch.tensor([[0.5, 0.0, -1.0], [2.0, 9.0, 9.0]]),
        },
        non_tensors={"uid": np.array(["1-0", "1-1"], dtype=object), "sample_index": np.array([0, 0])},
    )


def test_rows_have_no_padding_and_keep_the_tokens_of_tools():
    assert token_table(padded_batch()).to_pylist() == [
        {"uid": "1-0", "sample_index": 0, "prompt_ids": [5], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1],
         "advantages": [0.5, 0.0, -1.0]},
        {"uid": "1-1", "sample_index": 0, "prompt_ids": [6, 5], "response_ids": [4], "response_mask": [1],
         "advantages": [2.0]},
    ]  # fmt: skip


def test_both_prompts_of_a_policy_that_teaches_itself(tmp_path):
    prompts = {
        "teacher_prompts": torch.tensor([[6, 5], [0, 7]]),
        "teacher_prompts_mask": torch.tensor([[1, 1], [0, 1]]),
    }
    batch = padded_batch() | DataProto.from_dict(tensors=prompts)
    table = token_table(batch)
    assert table["teacher_prompt_ids"].to_pylist() == [[6, 5], [7]]
    dump = TokenDump(None, hf_tokenizer(make_tiny_run(tmp_path)["model"]), frequency=0)
    page = dump.page("step 1", table)
    (first, _), texts = page.sequences, dump.tokenizer.batch_decode([[6], [5]])
    assert [token["text"] for token in first["teacher_prompt"]] == texts
    assert f"Prompt as the teacher: {''.join(texts)}" in page.html


def test_files_come_every_so_many_steps_with_the_text_of_each_id(tmp_path):
    tokenizer = hf_tokenizer(make_tiny_run(tmp_path)["model"])
    dump = TokenDump(str(tmp_path / "tokens"), tokenizer, frequency=2)
    for step in (1, 2, 3, 4):
        dump.write(step, padded_batch(), padded_batch())
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["2.arrow", "4.arrow"]
    table = feather.read_table(tmp_path / "tokens/4.arrow")
    assert table.num_rows == 4
    assert table.schema.metadata[b"step"] == b"4"
    texts = json.loads(table.schema.metadata[b"tokens"])
    assert texts == {str(token): tokenizer.decode([token]) for token in (4, 5, 6, 7, 8, 9)}


def test_a_failed_write_is_counted_and_does_not_stop(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file")
    dump = TokenDump(str(tmp_path / "taken"), hf_tokenizer(make_tiny_run(tmp_path)["model"]), frequency=1)
    dump.write(1, padded_batch())
    dump.write(2, padded_batch())
    assert dump.failed == 2
    assert caplog.text.count("tokens cannot be written") == 1


def test_a_run_writes_its_tokens_and_those_of_validation(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    folders = {"trainer__rollout_data_dir": tmp_path / "train", "trainer__validation_data_dir": tmp_path / "val"}
    arguments = overrides(
        make_tiny_run(tmp_path), tmp_path, **folders, trainer__rollout_token_dump_freq=2, trainer__test_freq=2,
        actor_rollout_ref__actor__use_kl_loss=True, actor_rollout_ref__actor__ppo_epochs=2,
        actor_rollout_ref__actor__optim__lr=1e-2, custom_reward_function__path=tmp_path / "reward.py",
    )  # fmt: skip
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 3\n"
    )
    run_ppo(compose(arguments))

    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "1.jsonl", "1.numbers.json", "2.arrow", "2.jsonl", "2.numbers.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "val").iterdir()) == ["2.arrow", "2.jsonl"]
    records = [json.loads(line) for line in (tmp_path / "train/2.jsonl").read_text().splitlines()]
    rows = feather.read_table(tmp_path / "train/2.arrow").to_pylist()
    assert [(row["uid"], row["sample_index"]) for row in rows] == [(r["uid"], r["sample_index"]) for r in records]
    assert [len(row["response_ids"]) for row in rows] == [record["response_length"] for record in records]
    assert {record["data_source"] for record in records} == {"countdown"}
    for row in rows:
        numbers = [row[name] for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys")]
        assert all(len(values) == len(row["response_ids"]) for values in numbers)
        assert all(math.isfinite(value) for values in numbers for value in values)
        assert row["weight_versions"] == [row["weight_version"]] * len(row["response_ids"])
        assert sum(row["token_level_scores"]) == pytest.approx(records[rows.index(row)]["score"])
    ratios = [
        math.exp(new - old)
        for row in rows
        for new, old in zip(row["update_log_probs"], row["old_log_probs"], strict=True)
        if new == new  # NaN on tokens that are not the policy's
    ]
    assert max(abs(ratio - 1) for ratio in ratios) > 1e-3  # the second epoch's policy has moved
    clipped = {value for row in rows for value in row["update_clipped"]}
    assert clipped <= {0.0, 1.0}
    assert not {"old_log_probs", "update_log_probs"} & set(feather.read_table(tmp_path / "val/2.arrow").column_names)
    update = json.loads((tmp_path / "train/2.numbers.json").read_text())
    assert list(zip(update["uid"], update["sample_index"], strict=True)) == [
        (row["uid"], row["sample_index"]) for row in rows
    ]
    for row, gap, advantage in zip(rows, update["gap"], update["advantage"], strict=True):
        pairs = zip(row["rollout_log_probs"], row["old_log_probs"], strict=True)
        assert gap == pytest.approx(max(abs(math.exp(a) - math.exp(b)) for a, b in pairs), abs=1e-6)
        assert advantage == pytest.approx(max(map(abs, row["advantages"])))
    events = [json.loads(line) for line in (tmp_path / "log.run.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "end"]
    assert events[0]["config"]["trainer"]["rollout_token_dump_freq"] == 2
    spans = {name: (begin, end) for name, begin, end in events[2]["spans"]}
    step = spans["step"]
    order = [spans[name] for name in ("gen", "reward", "ref", "update_actor", "dump_numbers", "testing")]
    assert order == sorted(order)
    assert all(step[0] <= begin <= end <= step[1] for begin, end in order)
    assert events[3]["status"] == "done"


def test_a_frequency_without_a_folder_is_refused(tmp_path):
    arguments = overrides(make_tiny_run(tmp_path), tmp_path, trainer__rollout_token_dump_freq=2)
    with pytest.raises(ConfigError, match=r"(?s)trainer.rollout_token_dump_freq=2: the files have no folder.*remedy"):
        run_ppo(compose(arguments))
