"""Damaged files of a model folder are found by sizes, headers and JSON, without reading the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import save_file

from verl.errors import ConfigError
from verl.utils.model import check_finite, load_hf_config, require_on_hub
from verl.utils.model_facts.model_files import (
    file_problem,
    head_split_problem,
    model_type,
    quantization_problem,
    tokenizer_problem,
    weights_problem,
)
from verl.utils.tokenizer import hf_tokenizer

WEIGHTS = {"a": torch.zeros(64, 8), "b": torch.ones(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


def in_parts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name, weight in WEIGHTS.items():
        save_file({name: weight}, folder / f"model-{name}.safetensors")
    index = {"weight_map": {name: f"model-{name}.safetensors" for name in WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(WEIGHTS, folder / "pytorch_model.bin")


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep]) and None


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"12345678")


# The weights are 64 * 8 * 4 + 3 * 4 = 2060 bytes; the header is padded to a multiple of 8.
@pytest.mark.parametrize(
    ("layout", "damage", "problem"),
    [
        (None, cut("model.safetensors", 1500), r"model.safetensors is cut: it has 1500 bytes, and its header"),
        (None, cut("model.safetensors", 20), r"model.safetensors is cut or no safetensors file: 20 bytes do not hold"),
        (None, cut("model.safetensors", 0), r"model.safetensors is cut or no safetensors file: 0 bytes"),
        (None, longer, r"model.safetensors is damaged: it has \d+ bytes, and its header announces"),
        (None, lambda f: (f / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"wrong"), "header is not that"),
        (None, lambda f: (f / "model.safetensors").write_text("version https://git-lfs...\n"), "a pointer of Git LFS"),
        (None, cut("config.json", 5), r"config.json is damaged: it is no JSON \(Unterminated string"),
        (None, lambda f: (f / "config.json").write_text("[1]"), "is damaged: it holds a list, not an object"),
        (None, lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is damaged: it is no JSON"),
        (in_parts, cut("model-a.safetensors", 1500), "model-a.safetensors is cut: it has 1500 bytes"),
        (in_parts, lambda f: (f / "model-b.safetensors").unlink(), "model-b.safetensors is missing, which model.safet"),
        (in_parts, cut("model.safetensors.index.json", 9), "index.json is damaged: it is no JSON"),
        (in_parts, lambda f: (f / "model.safetensors.index.json").write_text("{}"), "it has no weight_map"),
        (as_pickle, cut("pytorch_model.bin", 2000), "pytorch_model.bin is cut: its 2000 bytes do not hold the whole"),
        (as_pickle, cut("pytorch_model.bin", 0), "pytorch_model.bin is empty"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(folder: Path, layout, damage, problem: str):
    if layout is not None:
        layout(folder)
    assert file_problem(folder) is None
    damage(folder)
    assert re.search(problem, str(file_problem(folder)))
    assert weights_problem(folder) is None


@pytest.mark.parametrize("inside", [False, True], ids=["of the model", "of its text model"])
def test_quantized_weights_are_told(folder: Path, inside: bool):
    assert quantization_problem(folder) is None
    fields = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps({"text_config": fields} if inside else fields))
    assert "its weights are quantized (bitsandbytes)" in str(quantization_problem(folder))


def test_a_folder_without_weights_or_vocabulary(folder: Path):
    assert "holds no tokenizer" in str(tokenizer_problem(folder))
    # With its settings alone Transformers makes a tokenizer of no words.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ConfigError, match=r"the folder holds no tokenizer: none of tokenizer.json"):
        hf_tokenizer(str(folder))
    (folder / "vocab.json").write_text("{}")
    assert tokenizer_problem(folder) is None
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in str(weights_problem(folder))


def test_a_config_that_transformers_cannot_read_is_named_too(folder: Path):
    (folder / "config.json").write_text('{"model_type"')
    with pytest.raises(ConfigError, match=r"config.json is damaged: it is no JSON"):
        load_hf_config(str(folder))


def test_weights_that_are_not_finite_are_named():
    model = torch.nn.Linear(4, 2)
    check_finite(model.named_parameters(), "there")
    with torch.no_grad():
        model.weight.fill_(3e38)  # finite, though the sum of eight of them is not
    check_finite(model.named_parameters(), "there")
    with torch.no_grad():
        model.bias[1] = float("inf")
    with pytest.raises(ConfigError, match=r"in 'there' are not finite \(nan or infinite\): bias \(1 of 2 values\)"):
        check_finite(model.named_parameters(), "there")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(httpx2.ConnectError("no route"), r"cannot be asked \(no route\)"), (404, "the hub has no model of that name")],
    ids=["unreachable", "unknown"],
)
def test_a_name_that_no_hub_has_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, answer, problem: str):
    asked = []

    def send(self, request: httpx2.Request, **_: object) -> httpx2.Response:
        asked.append(str(request.url))
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(answer, headers={"X-Error-Code": "RepoNotFound"}, request=request)

    monkeypatch.setattr(httpx2.Client, "send", send)
    require_on_hub.cache_clear()
    for _ in range(2):
        with pytest.raises(ConfigError, match=problem):
            hf_tokenizer("nobody/no-such-model")
    assert asked == ["https://huggingface.co/nobody/no-such-model/resolve/main/config.json"] * 2


def test_the_config_of_a_name_on_the_hub_is_read_where_it_was_downloaded(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Org--Vision" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3_vl"}')
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    kinds = [model_type(Path(name)) for name in ("Org/Vision", "Org/Other", "Org/ no name", "Vision")]
    assert kinds == ["qwen3_vl", None, None, None]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(8, 8, 2, True), (8, 2, 2, True), (8, 2, 4, True), (8, 2, 8, True), (6, 2, 4, False), (12, 3, 2, False)],
)
def test_heads_are_dealt_out_evenly(heads: int, kv_heads: int, size: int, fits: bool) -> None:
    assert (head_split_problem(heads, kv_heads, size) is None) == fits
