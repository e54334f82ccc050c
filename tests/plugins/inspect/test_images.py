"""``python -m verl.trainer.inspect_data`` on rows with images."""

from __future__ import annotations

import sys

import pytest

from tests.support.vision_models import picture, png, tiny_vision_model_dir, write_parquet
from verl.plugins.inspect.data import main


def image(color, size=(16, 16)):
    return {"bytes": png(picture(color, size=size)), "path": None}


BROKEN = {"bytes": b"no image", "path": None}
ROWS = [  # tokens: <user> 1, each image its own and 2 around it, ? 1, <assistant> 1
    ("<image>?", [image("red")]),  # 9
    ("<image>?", [image("blue", (24, 16))]),  # 11, the same text with another picture
    ("<image><image>?", [image("red"), image("red", (16, 32))]),  # 3 + 6 + 10
    ("<image>?", [BROKEN]),
    ("<image>?", [image("red")]),  # repeats row 0
    ("abcd", []),  # 6
]
LENGTHS = "min 6 median 9 mean 11 p95 19 max 19"
IMAGES = "images: 5 in 4 rows, 26 tokens (48.1% of all, counted in the lengths above): 4 to 8 an image, at most 12"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def inspected(monkeypatch, capsys):
    """A function that runs the command and returns its exit code and what it wrote, as one line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["inspect_data", *arguments, "--no-color"])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return run


def test_prompts(inspected, path, tmp_path):
    rows = [{"data_source": "x", "prompt": [{"role": "user", "content": text}], "images": i} for text, i in ROWS]
    file = write_parquet(tmp_path / "x.parquet", rows)
    settings = (f"data.train_files={file}", f"actor_rollout_ref.model.path={path}", "data.train_batch_size=1")
    code, told = inspected(*settings, "data.max_prompt_length=19")
    assert code == 0
    for part in (
        "data.train_files: 5 rows",
        LENGTHS,
        "too long: none",
        IMAGES,
        f"broken images: 1 rows are left out, and not counted here; the first: {file}, row 3: ",
        f"duplicates: 1 rows are written as an earlier one: {file}, row 4 repeats {file}, row 0",
        "<user><|vision_start|><|image_pad|> x 4<|vision_end|>?<assistant>",
    ):
        assert part in told, part
    # never cut: the run stops where it would cut a text
    code, told = inspected(*settings, "data.max_prompt_length=10", "data.truncation=right")
    assert code == 1
    assert "1 of 5" not in told
    assert "2 rows (40.0%) are longer than data.max_prompt_length=10 and 2 of them with images, which are" in told
    code, told = inspected(*settings, "data.max_prompt_length=10", "data.filter_overlong_prompts=true")
    assert code == 0
    assert "are left out (data.filter_overlong_prompts)" in told


def test_conversations(inspected, path, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}], "images": images}
        for text, images in ROWS
    ]
    file = write_parquet(tmp_path / "x.parquet", rows)
    code, told = inspected("sft", f"data.train_files={file}", f"model.path={path}", "data.max_length=22")
    assert code == 1  # 19 + red + <eos>
    assert "min 10 median 13 mean 15 p95 23 max 23" in told
    assert "images: 5 in 4 rows, 26 tokens" in told
    assert "row 2 has 23 tokens, more than max_length=22" in told
    assert "<|image_pad|> x 4<|vision_end|>?<assistant>[[red<eos>]]" in told


def test_pairs(inspected, path, tmp_path):
    rows = [{"prompt": text, "chosen": "red", "rejected": "b", "images": images} for text, images in ROWS]
    file = write_parquet(tmp_path / "x.parquet", rows)
    code, told = inspected("dpo", f"data.train_files={file}", f"model.path={path}", "data.max_length=23")
    assert code == 0
    assert "min 10 median 13 mean 15 p95 23 max 23" in told
    assert "images: 5 in 4 rows, 26 tokens" in told
    assert f"{file}, row 0, rejected: 11 tokens, 2 trained on" in told
