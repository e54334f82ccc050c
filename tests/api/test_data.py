"""Rows of every kind become files that keep them as they are."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pytest

from verl.api.data import as_rows, read_jsonl, supervised_rows, write_jsonl, write_prompts
from verl.errors import DataError
from verl.vision.images import read_image

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def test_all_kinds_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(ROWS, tmp_path / "rows.jsonl", "data")
    pd.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    kinds: list[Any] = [
        ROWS,
        tuple(ROWS),
        datasets.Dataset.from_list(ROWS),
        pd.DataFrame(ROWS),
        tmp_path / "rows.jsonl",
        str(tmp_path / "rows.parquet"),
    ]
    assert [as_rows(kind, "data") for kind in kinds] == [ROWS] * len(kinds)
    assert as_rows([str(tmp_path / "rows.jsonl")] * 2, "data") == ROWS * 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "data has no rows"),
        (["a"], "'a' is no file of rows"),
        ("a.jsonl", "there is no file 'a.jsonl'"),
        (pd.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]), "several columns called x"),
        ([{"prompt": "a"}, 3], "data, row 1 is int 3, not a dict"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "of train. Give one of them"),
        ((row for row in ROWS), "without a length"),
        (7, "data is int"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DataError) as error:
        as_rows(data, "data")
    assert words in str(error.value)


def test_rows_keep_their_own_keys_and_values(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "call": {"city": "Rome"}, "size": np.float64(0.5)},
        {"prompt": "b\u2028c", "call": {"ticker": "X"}, "when": datetime.date(2026, 1, 2), "mask": np.array([1, 0])},
    ]
    files = write_prompts(rows, tmp_path / "train.jsonl", "prompt", "data")
    assert (files.count, files.text_prompts, files.columns) == (2, False, ["prompt", "call", "size", "when", "mask"])
    first, second = read_jsonl(tmp_path / "train.jsonl")
    assert (first["call"], first["size"]) == ({"city": "Rome"}, 0.5)
    assert (second["prompt"], second["call"], second["when"], second["mask"]) == (
        "b\u2028c",
        {"ticker": "X"},
        "2026-01-02",
        [1, 0],
    )


def test_images_become_urls_that_a_run_reads(tmp_path: Path) -> None:
    picture = PIL.Image.new("RGBA", (2, 3), (255, 0, 0, 255))
    picture.save(tmp_path / "a.png")
    rows = [{"images": [picture]}, {"images": [{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]}]
    write_jsonl(rows, tmp_path / "rows.jsonl", "data")
    first, second = read_jsonl(tmp_path / "rows.jsonl")
    for value in (first["images"][0], second["images"][0]):
        read = read_image(value, "here")
        assert (read.size, read.convert("RGB").getpixel((0, 0))) == ((2, 3), (255, 0, 0))


def test_a_missing_prompt_and_a_value_without_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data has no column 'prompt'; its columns are question\. .*prompt_key"):
        write_prompts([{"question": "a"}], tmp_path / "a.jsonl", "prompt", "data")
    with pytest.raises(DataError, match="data, row 1 cannot be written as JSON: object"):
        write_jsonl([{"a": 1}, {"a": object()}], tmp_path / "a.jsonl", "data")
    for prompt in (None, float("nan"), 3):
        with pytest.raises(DataError, match=f"data, row 1: prompt is {prompt}"):
            write_prompts([{"prompt": "a"}, {"prompt": prompt}], tmp_path / "a.jsonl", "prompt", "data")
    with pytest.raises(DataError, match=r"neither a column messages nor prompt and completion\. Its columns: prompt,"):
        supervised_rows([{"prompt": "a", "response": "b"}], "data")
    assert supervised_rows([{"q": "a", "r": "b"}], "data", ["data.prompt_key"]) == ([{"q": "a", "r": "b"}], {})
