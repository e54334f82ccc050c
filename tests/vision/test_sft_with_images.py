"""Supervised training on conversations with images: rows, loss, gradients and steps, in every layout."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, picture, png, tiny_vision_model_dir, write_parquet
from verl.datasets import MultiTurnSFTDataset, SFTDataset
from verl.errors import DataError
from verl.trainer.config import SFTDataConfig
from verl.trainer.config.command_line import compose
from verl.trainer.sft_trainer import run_sft
from verl.utils import hf_processor, hf_tokenizer

IMAGE = 106
STEPS, LR, EPS = 2, 1e-2, 1e-2


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def image(color: str, size: tuple[int, int] = (16, 16)) -> dict[str, Any]:
    return {"bytes": png(picture(color, size=size)), "path": None}


def talks() -> list[dict[str, Any]]:
    """Two turns with a picture each; one picture; two pictures in a message; text that speaks of <image>."""
    return [
        {
            "messages": [
                said("user", "<image>?"),
                said("assistant", "red"),
                said("user", "and <image>"),
                said("assistant", "b"),
            ],
            "images": [image("red"), image("blue", (24, 16))],
        },
        {"messages": [said("user", "see<image>"), said("assistant", "green")], "images": [image("green", (16, 32))]},
        {
            "messages": [said("user", "<image>or<image>"), said("assistant", "w")],
            "images": [image("white"), image("red", (32, 32))],
        },
        {"messages": [said("user", "<image> is a tag"), said("assistant", "yes")], "images": []},
    ]  # fmt: skip


@pytest.fixture(scope="module", params=DENSE_FAMILIES)
def path(request, tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp(request.param) / "model", request.param)


def opened(path: str, file: str, kind: type = MultiTurnSFTDataset, **changes: Any) -> Any:
    config = SFTDataConfig(**{"max_length": 64, **changes})
    return kind(file, hf_tokenizer(path), config, hf_processor(path))


def test_the_columns_of_a_conversation(path, tmp_path):
    data = opened(path, write_parquet(tmp_path / "talks.parquet", talks()))
    tokenizer = hf_tokenizer(path)
    model: Any = AutoModelForImageTextToText.from_pretrained(path)
    for number, tokens in enumerate([[4, 6], [8], [4, 16], []]):
        item = data[number]
        ids, mask = item["input_ids"], item["loss_mask"].bool()
        assert int((ids == IMAGE).sum()) == sum(tokens)
        assert tokenizer.decode(ids[mask]) == ["red<eos>b<eos>", "green<eos>", "w<eos>", "yes<eos>"][number]
        given = dict(item["multi_modal_inputs"])
        expected, _ = model.model.get_rope_index(
            ids[None], (ids == IMAGE).int()[None], image_grid_thw=given.get("image_grid_thw")
        )
        assert item["position_ids"][0].tolist() == [*range(len(ids))]
        assert item["position_ids"][1:].equal(expected[:, 0])
    longer = opened(path, str(tmp_path / "talks.parquet"), pad_mode="right")[1]
    assert longer["position_ids"].shape == (4, 64)


def plain_steps(path: str, data: Any) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of steps on all rows, the weights after them, and the norm of the first gradient; row by row."""
    model: Any = AutoModelForImageTextToText.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.999), eps=EPS)
    losses, norm = [], 0.0
    for _ in range(STEPS):
        total, tokens = torch.zeros(()), 0
        for number in range(len(data)):
            ids, mask = data[number]["input_ids"], data[number]["loss_mask"].bool()
            images = dict(data[number]["multi_modal_inputs"])
            logits = model(input_ids=ids[None], mm_token_type_ids=(ids == IMAGE).int()[None], **images).logits[0]
            log_p = logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            total, tokens = total - log_p[mask[1:]].sum(), tokens + int(mask[1:].sum())
        optimizer.zero_grad()
        (total / tokens).backward()
        found = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        norm = norm or found
        optimizer.step()
        losses.append(float(total.detach()) / tokens)
    return losses, {name: p.detach() for name, p in model.named_parameters()}, norm


LAYOUTS = {
    "packed, by tokens": {"data.use_dynamic_bsz": "true", "data.max_token_len_per_gpu": 64},
    "packed, one by one": {"data.use_dynamic_bsz": "false", "data.micro_batch_size_per_gpu": 1},
    "padded": {
        "data.use_dynamic_bsz": "false",
        "data.micro_batch_size_per_gpu": 4,
        "model.use_remove_padding": "false",
    },
}


CASES = [
    *((family, "packed, by tokens") for family in DENSE_FAMILIES),
    *(("qwen3_vl", layout) for layout in ("packed, one by one", "padded")),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_steps_are_those_of_plain_pytorch(family, layout, tmp_path, monkeypatch):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    file = write_parquet(tmp_path / "talks.parquet", talks())
    losses, weights, norm = plain_steps(path, opened(path, file))
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    settings = {
        "data.train_files": file, "data.val_files": file, "data.train_batch_size": 4, "data.num_workers": 0,
        "data.max_length": 64, "model.path": path, "engine.dtype": "float32", "optim.lr": LR,
        "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]", "optim.override_optimizer_config": f"{{eps: {EPS}}}",
        "optim.lr_scheduler_type": "constant", "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS,
        "trainer.test_freq": 1, "trainer.controller": "local", "trainer.device": "cpu", "trainer.logger": "[file]",
        "trainer.default_local_dir": tmp_path / "run", "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }  # fmt: skip
    run_sft(compose([f"{key}={value}" for key, value in (settings | LAYOUTS[layout]).items()], "sft_trainer"))
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    assert [steps[n]["train/loss"] for n in (1, 2)] == pytest.approx(losses, rel=1e-5)
    assert steps[1]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert steps[1]["val/loss"] == pytest.approx(losses[1], rel=1e-5)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "global_step_2" / "huggingface")
    for name, weight in trained.named_parameters():
        assert_close(weight, weights[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_a_prompt_and_a_response(path, tmp_path):
    rows = [{"ask": "<image>?", "say": "<image> red", "images": [image("red")]}]
    data = opened(path, write_parquet(tmp_path / "x.parquet", rows), SFTDataset, prompt_key="ask", response_key="say")
    item = data[0]
    assert hf_tokenizer(path).decode(item["input_ids"][item["loss_mask"].bool()]) == "<image> red<eos>"
    assert int((item["input_ids"] == IMAGE).sum()) == 4


def row(asked: str, *images: Any, answer: str = "red", **more: Any) -> dict[str, Any]:
    return {"messages": [said("user", asked), said("assistant", answer)], "images": list(images), **more}


def test_what_is_refused_or_left_out(tmp_path, caplog):
    path = tiny_vision_model_dir(tmp_path / "model")
    cases = {
        r"1 <image> placeholder\(s\), and the row has 2": [row("<image>", image("red"), image("red"))],
        "of the assistant, has an image": [row("who?", image("red"), answer="<image>")],
        "conversations with images are never cut: the first": [row("<image>" + "a" * 60, image("red"))],
        r"after the chat template, and 1 belong": [row("<image><|image_pad|>", image("red"))],
        "sounds are not read": [row("<image>", image("red"), audios=["a.wav"])],
    }
    for number, (message, rows) in enumerate(cases.items()):
        file = write_parquet(tmp_path / f"{number}.parquet", rows)
        with pytest.raises(DataError, match=message):
            opened(path, file, truncation="right")[0]
    broken = {"bytes": b"no image", "path": None}
    file = write_parquet(tmp_path / "broken.parquet", [row("<image>", broken), row("<image>", image("red"))])
    data = opened(path, file)
    assert (len(data), data.place(0)) == (1, f"{file}, row 1")
    assert "1 of 2 rows have images or videos that cannot be used" in caplog.text
