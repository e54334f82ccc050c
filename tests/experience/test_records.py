"""Dumps of samples on a disk that is full or unwritable.

Training goes on, no partial line is written, and ``recovery/failed_dumps`` counts.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.full_disk import files_of_at_most
from verl.experience.records import LONGEST_TEXT, RecordFolder, generation_records, sample_numbers
from verl.protocol import DataProto
from verl.testing.models import tiny_tokenizer
from verl.utils.file_log import THIS_RUN
from verl.workers.reward_manager import NaiveRewardManager


def records(count: int) -> list[dict]:
    return [{"input": "x" * 60, "n": n} for n in range(count)]


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_lines_are_whole_and_the_run_is_told_once(tmp_path, caplog):
    folder = RecordFolder(str(tmp_path / "new" / "dump"))
    folder.write(1, records(2))
    with files_of_at_most(400), caplog.at_level(logging.WARNING):
        folder.write(1, records(9), append=True)  # 160 bytes are there, 80 to a line: it breaks off inside of a line
        folder.write(2, records(9))
    file = tmp_path / "new" / "dump" / "1.jsonl"
    assert numbers(file) == [0, 1]
    assert folder.failed == 2
    assert caplog.text.count("samples cannot be written") == 1
    assert "File too large" in caplog.text
    folder.write(1, records(3), append=True)  # there is room again
    assert numbers(file) == [0, 1, 0, 1, 2]
    folder.write(1, [{"n": 0, "score": math.nan, "info": {"values": [math.inf, np.float64("nan"), 1.5]}}])
    assert numbers(file) == [0]
    assert file.read_text().startswith('{"n": 0, "score": null, "info": {"values": [null, null, 1.5]}')


@pytest.mark.parametrize("there", ["a file", "nothing"])
def test_no_folder(tmp_path, there):
    (tmp_path / "file").write_text("")
    folder = RecordFolder(str(tmp_path / "file" / "dump") if there == "a file" else None)
    folder.write(1, records(1))
    assert folder.failed == (there == "a file")


def test_secrets_are_masked_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "abcdef-123456")
    talk = [{"role": "tool", "content": 'curl "http://me:pass@host?key=12345"'}]
    record = {"output": "abcdef-123456, of-the-config", "gts": {"a": ["abcdef-123456"]}, "ids": [1, 2], "talk": talk}
    RecordFolder(str(tmp_path), ["of-the-config"]).write(1, [record])
    told = json.loads((tmp_path / "1.jsonl").read_text())
    assert told.pop("run") == THIS_RUN  # by it the view knows whose samples they are
    assert told == {
        "output": "***, ***",
        "gts": {"a": ["***"]},
        "ids": [1, 2],
        "talk": [{"role": "tool", "content": 'curl "http://***@host?key=***"'}],
    }


def test_a_record_has_the_columns_that_the_reward_function_names():
    def score(solution_str, label, extra_info, level=1, **settings):
        return 1.0

    def standard(data_source, solution_str, ground_truth):
        return 1.0

    tokenizer = tiny_tokenizer("char")
    columns = {
        "label": ["x" * (LONGEST_TEXT + 7), np.array([1, 2])], "level": [None, 3], "index": [0, 1],
        "extra_info": [{"a": 1}, {}], "ground_truth": ["4", None],
    }  # fmt: skip
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[5], [6]]), "responses": torch.tensor([[7], [8]]),
            "attention_mask": torch.ones(2, 2, dtype=torch.long),
        },
        non_tensors={name: np.fromiter(values, dtype=object, count=2) for name, values in columns.items()},
    )  # fmt: skip
    records = generation_records(
        1, tokenizer, batch, torch.zeros(2, 1), {}, NaiveRewardManager(tokenizer, 0, compute_score=score)
    )
    assert records[0]["columns"] == {
        "label": "x" * LONGEST_TEXT + " [... 7 more characters]", "extra_info": {"a": 1}
    }  # fmt: skip
    assert records[1]["columns"] == {"label": [1, 2], "level": 3}
    assert [record["gts"] for record in records] == ["4", None]
    manager = NaiveRewardManager(tokenizer, 0, compute_score=standard)
    assert "columns" not in generation_records(1, tokenizer, batch, torch.zeros(2, 1), {}, manager)[0]


def test_a_trajectory_is_recorded_by_its_turns_and_long_texts_are_cut():
    tokenizer = tiny_tokenizer()
    prompt, first, tool, second = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("p", "ab", "42", "c")
    )
    ids, mask = first + tool + second, [1] * len(first) + [0] * len(tool) + [1] * len(second)
    width = len(ids) + 2
    long = [{"role": "tool", "content": "x" * (LONGEST_TEXT + 7)}]
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, *prompt]] * 2),
            "responses": torch.tensor([[*ids, 0, 0]] * 2),
            "attention_mask": torch.tensor([[0, *[1] * len(prompt), *[1] * len(ids), 0, 0]] * 2),
            "response_mask": torch.tensor([[*mask, 0, 0]] * 2),
        },
        non_tensors={
            name: np.fromiter(values, dtype=object, count=2)
            for name, values in {
                "trajectory_id": ["1-0/0", "1-0/1"],
                "agent": ["main", "main"],
                "agent_name": ["mine", "mine"],
                "trajectory_status": ["done", "timeout"],
                "trajectory_message": ["", "too long"],
                "__num_turns__": [3, 2],
                "agent_loop_metrics": [{"generate_sequences": 1.5}] * 2,
                "trajectory_conversation": [long, None],
            }.items()
        },
    )
    scores = torch.zeros(2, width)
    scores[0, len(first) - 1], scores[0, len(ids) - 1] = 0.25, 0.5
    told, failed = (record["trajectory"] for record in generation_records(1, tokenizer, batch, scores, {}))
    assert told["turn_scores"] == [0.25, 0.5]
    assert told["response_mask"] == [[1, len(first)], [0, len(tool)], [1, len(second)]]
    assert (told["prompt_ids"], told["response_ids"], told["num_turns"]) == (prompt, ids, 3)
    assert told["conversation"][0]["content"] == "x" * LONGEST_TEXT + " [... 7 more characters]"
    roles = [(part["role"], part["content"].replace(" ", "")) for part in failed["conversation"]]
    assert roles == [("assistant", "ab"), ("others", "42"), ("assistant", "c")]
    assert (failed["status"], failed["message"]) == ("timeout", "too long")


def test_numbers_of_samples_are_the_largest_over_the_tokens_that_are_trained_on(tmp_path):
    half, quarter = math.log(0.5), math.log(0.25)
    columns = {
        # the third token of the first sample is a tool's, the second sample has none that is trained on
        "response_mask": torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]),
        "old_log_probs": torch.tensor([[half, half, 0.0], [0.0, 0.0, 0.0], [half, math.nan, half]]),
        "rollout_log_probs": torch.tensor([[quarter, half, -9.0], [-9.0, -9.0, -9.0], [half, half, half]]),
        "ref_log_prob": torch.tensor([[half, quarter, -9.0], [-9.0, -9.0, -9.0], [half, half, half]]),
        "advantages": torch.tensor([[1.0, -2.0, 7.0], [7.0, 7.0, 7.0], [0.5, -0.25, 0.0]]),
    }
    names = {"uid": np.array(["a", "a", "b"], dtype=object), "sample_index": np.array([0, 1, 0])}
    batch = DataProto.from_dict(columns, non_tensors=names)
    found = sample_numbers(batch)
    assert (found["uid"], found["sample_index"]) == (["a", "a", "b"], [0, 1, 0])
    assert found["gap"] == pytest.approx([0.25, 0, math.inf])  # |0.5 - 0.25|; NaN counts as the largest
    # d = ln(0.25 / 0.5) = -ln 2: exp(d) - d - 1 = 0.5 + ln 2 - 1
    assert found["kl"] == pytest.approx([math.log(2) - 0.5, 0, math.inf])
    assert found["advantage"] == pytest.approx([2, 0, 0.5])
    RecordFolder(str(tmp_path)).write_numbers(3, batch)
    in_file = {"gap": [*found["gap"][:2], None], "kl": [*found["kl"][:2], None], "run": THIS_RUN}  # standard JSON
    assert json.loads((tmp_path / "3.numbers.json").read_text()) == found | in_file
    assert [path.name for path in tmp_path.iterdir()] == ["3.numbers.json"]
    assert sample_numbers(batch.select(batch_keys=["response_mask", "advantages"])).keys() == {
        "uid", "sample_index", "advantage",
    }  # fmt: skip
