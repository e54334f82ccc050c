"""Geometry3K in its published form becomes rows that a run reads and its scorer scores."""

import sys

import pyarrow.parquet as pq
import pytest

from examples.data_preprocess import _common, geo3k
from tests.support.vision_models import picture, png, tiny_vision_model_dir, write_parquet
from verl.datasets import RLHFDataset
from verl.scorers import default_compute_score
from verl.utils import hf_processor, hf_tokenizer


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["geo3k.py", *map(str, arguments)])
    _common.run(geo3k.main)


def test_a_folder_of_parquet_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.png").write_bytes(png(picture("green")))
    image = {"bytes": png(picture("red", size=(24, 16))), "path": "a.png"}
    rows = [
        {"images": [image], "problem": "<image>Find x.", "answer": "40"},
        {"images": [{"bytes": None, "path": str(tmp_path / "a.png")}], "problem": "Find y.", "answer": "3"},
    ]
    write_parquet(tmp_path / "raw" / "train.parquet", rows)
    write_parquet(tmp_path / "raw" / "test.parquet", rows[:1])
    call(monkeypatch, "--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path / "out")
    assert "bytes" in capsys.readouterr().out
    made = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert made[0]["prompt"][0]["content"].startswith("<image>Find x. Think first")
    assert made[1]["prompt"][0]["content"].startswith("<image>Find y. Think first")
    assert made[0]["images"] == [{"bytes": image["bytes"], "path": None}]
    path = tiny_vision_model_dir(tmp_path / "model")
    found = RLHFDataset(
        str(tmp_path / "out" / "train.parquet"), hf_tokenizer(path), {"max_prompt_length": 400}, hf_processor(path)
    )
    assert [int((found[i]["input_ids"] == 106).sum()) for i in range(2)] == [6, 4]
    truth = made[0]["reward_model"]["ground_truth"]
    assert default_compute_score(geo3k.DATA_SOURCE, r"<think>a</think> \boxed{40}", truth) == pytest.approx(1.0)
    assert default_compute_score(geo3k.DATA_SOURCE, r"\boxed{40}", truth) == pytest.approx(0.9)


def test_figures_without_a_place_are_refused(tmp_path, monkeypatch):
    rows = [{"images": [{"bytes": png(picture("red"))}], "problem": "<image><image>x", "answer": "1"}] * 12
    file = write_parquet(tmp_path / "all.parquet", rows)
    with pytest.raises(SystemExit, match="1 images and 2 <image>"):
        call(monkeypatch, "--local_dataset_path", file, "--local_save_dir", tmp_path / "out")
