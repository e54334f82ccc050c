"""Preference pairs whose prompts have images and videos: rows, and steps of DPO and of reward models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.preferences import numbers_of
from tests.support.vision_models import DENSE_FAMILIES, film, picture, png, tiny_vision_model_dir, write_parquet
from tests.vision.test_videos import IMAGE, VIDEO, arguments_of
from verl.datasets import RMDataset
from verl.datasets.rm_dataset import pair_collate_fn
from verl.errors import DataError
from verl.model_merger import merge
from verl.trainer.config import PreferenceDataConfig
from verl.trainer.config.command_line import compose
from verl.trainer.dpo_trainer import run_dpo
from verl.trainer.rm_trainer import run_rm
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.image_reward_models import sequence_classifier

STEPS, LR, EPS, BETA = 2, 1e-2, 1e-2, 0.5


def image(color: str, size: tuple[int, int] = (16, 16)) -> dict[str, Any]:
    return {"bytes": png(picture(color, size=size)), "path": None}


def pair(prompt: Any, chosen: Any, rejected: Any, *images: Any, videos: Any = ()) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "images": list(images), "videos": list(videos)}


def pairs() -> list[dict[str, Any]]:
    """One picture; a film and a picture; a long response that speaks of <image>; texts alone."""
    frames = [{"bytes": png(frame)} for frame in film(["red", "green"], (24, 16))]
    return [
        pair("<image>?", "red", "b", image("red")),
        pair("<video>or<image>", "w", "green", image("white"), videos=[{"video": frames, "fps": 4.0}]),
        pair("see <image>", "no <image> here", "yes", image("green", (16, 32))),
        pair("a <image>?", "yes", "no"),
    ]


def opened(path: str, file: str, **changes: Any) -> RMDataset:
    config = PreferenceDataConfig(**{"max_length": 64, **changes})
    return RMDataset(file, hf_tokenizer(path), config, hf_processor(path))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("model"))


def test_the_columns_of_a_pair(path, tmp_path):
    data = opened(path, write_parquet(tmp_path / "pairs.parquet", pairs()))
    tokenizer = hf_tokenizer(path)
    model: Any = AutoModelForImageTextToText.from_pretrained(path)
    texts = [("red", "b"), ("w", "green"), ("no <image> here", "yes"), ("yes", "no")]
    for number, (of_images, of_videos) in enumerate([(4, 0), (4, 6), (8, 0), (0, 0)]):
        item = data[number]
        for side in range(2):
            length = int(item["attention_mask"][side].sum())
            ids, mask = item["input_ids"][side, :length], item["loss_mask"][side, :length].bool()
            assert [int((ids == one).sum()) for one in (IMAGE, VIDEO)] == [of_images, of_videos]
            assert tokenizer.decode(ids[mask]) == f"{texts[number][side]}<eos>"
            given = arguments_of(ids, item["multi_modal_inputs"])
            grids = {name: given[name] for name in given if name.endswith(("thw", "ts"))}
            expected, _ = model.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], **grids)
            assert item["position_ids"][side, 0, :length].tolist() == [*range(length)]
            assert item["position_ids"][side, 1:, :length].equal(expected[:, 0])
    batch = pair_collate_fn(tokenizer, data.config)([data[0], data[1]])
    assert batch["position_ids"].shape == (2, 2, 4, batch["input_ids"].shape[-1])


def test_images_in_parts_and_in_whole_conversations(path, tmp_path):
    part = {"type": "image", "text": None, "image": image("red")}
    asked = {"role": "user", "content": [part, {"type": "text", "text": "?", "image": None}]}
    inline = [{"prompt": [asked], "chosen": "red", "rejected": "b"}]
    said = [{"role": "user", "content": "<image>?"}]
    whole = [
        {
            "chosen": [*said, {"role": "assistant", "content": "red"}],
            "rejected": [*said, {"role": "assistant", "content": "b"}],
            "images": [image("red")],
        }
    ]
    expected = opened(path, write_parquet(tmp_path / "a.parquet", pairs()))[0]
    for rows, prompt_key in ((inline, "prompt"), (whole, None)):
        found = opened(path, write_parquet(tmp_path / "b.parquet", rows), prompt_key=prompt_key)[0]
        for name in ("input_ids", "loss_mask", "position_ids"):
            assert found[name].equal(expected[name])
        assert found["multi_modal_inputs"]["pixel_values"].equal(expected["multi_modal_inputs"]["pixel_values"])


def test_what_is_refused_or_left_out(path, tmp_path, caplog):
    red = image("red")
    asked = {"role": "user", "content": "?"}
    cases = {
        r"row 0, the prompt: the messages have 1 <image> placeholder\(s\), and the row has 2": [
            pair("<image>", "a", "b", red, red)
        ],
        r"row 0, the prompt: the messages have 0 <image> placeholder\(s\), and the row has 1": [
            pair("?", "<image>", "b", red)
        ],
        "a message of the assistant has an image or a video": [
            pair([asked, {"role": "assistant", "content": "<image>"}, asked], "a", "b", red)
        ],
        "1 of 1 pairs are longer than max_length=64 and pairs with images are never cut: the first is": [
            pair("<image>" + "a" * 60, "b", "c", red)
        ],
        "row 0, rejected: it has an image or a video that the prompt does not have": [
            pair("?", "a", [{"role": "assistant", "content": [{"type": "image", "image": red}]}])
        ],
        "row 0, chosen: it has an image or a video that the prompt does not have": [
            pair("?", [{"role": "assistant", "content": [{"type": "video", "video": [red, red]}]}], "b")
        ],
        r"the messages have 0 <video> placeholder\(s\), and the row has 1": [pair("?", "a", "b", videos=[[red, red]])],
        "sounds are not read": [pair("<image>", "a", "b", red) | {"audios": ["a.mp3"]}],
    }
    for number, (message, rows) in enumerate(cases.items()):
        with pytest.raises(DataError, match=message):
            opened(path, write_parquet(tmp_path / f"{number}.parquet", rows), truncation="left")
    file = write_parquet(
        tmp_path / "x.parquet", [pair("<image>", "a", "b", {"bytes": b"no", "path": None}), pairs()[0]]
    )
    data = opened(path, file)
    assert (len(data), data.place(0)) == (1, f"{file}, row 1")
    assert "1 of 2 rows have images or videos that cannot be used" in caplog.text
    with pytest.raises(DataError, match="No image processor was given"):
        RMDataset(file, hf_tokenizer(path), PreferenceDataConfig())


def side(data: RMDataset, number: int, which: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Token ids, loss mask and further arguments of a model's own forward pass for one side of a pair."""
    item = data[number]
    length = int(item["attention_mask"][which].sum())
    ids, mask = item["input_ids"][which, :length], item["loss_mask"][which, :length].bool()
    given = arguments_of(ids, item["multi_modal_inputs"])
    return ids, mask, {name: value for name, value in given.items() if name != "input_ids"}


class PlainPolicy:
    """Rewards of DPO by Transformers: beta times the log-ratio of a response to the model before training."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path)
        self.before: Any = AutoModelForImageTextToText.from_pretrained(path).requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def reward(self, data: RMDataset, number: int, which: int) -> Tensor:
        ids, mask, more = side(data, number, which)

        def log_prob(model: Any) -> Tensor:
            logits = model(input_ids=ids[None], **more).logits[0]
            return logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[mask[1:]].sum()

        return BETA * (log_prob(self.model) - log_prob(self.before))


class PlainScore:
    """Rewards of a linear head, zero at first, on the hidden state of the last token."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path).model
        self.score = torch.zeros(1, self.model.config.text_config.hidden_size, requires_grad=True)

    def weights(self) -> dict[str, Tensor]:
        return {"score.weight": self.score} | {f"model.{name}": p for name, p in self.model.named_parameters()}

    def reward(self, data: RMDataset, number: int, which: int) -> Tensor:
        ids, _, more = side(data, number, which)
        return self.model(input_ids=ids[None], **more).last_hidden_state[0, -1] @ self.score[0]


def plain_steps(plain: Any, data: RMDataset) -> tuple[list[float], float]:
    """Losses of steps on all pairs, which change the weights of ``plain``, and the norm of the first gradient."""
    weights = list(plain.weights().values())
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0, betas=(0.9, 0.999), eps=EPS)
    losses, norm = [], 0.0
    for _ in range(STEPS):
        gaps = [plain.reward(data, number, 0) - plain.reward(data, number, 1) for number in range(len(data))]
        loss = -logsigmoid(torch.stack(gaps)).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = norm or float(torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None]))
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norm


TRAINERS = {
    "dpo_trainer": (run_dpo, PlainPolicy, {"loss.beta": BETA}),
    "rm_trainer": (run_rm, PlainScore, {}),
}


def trained(name: str, path: str, file: str, folder: Any, steps: int, **changes: Any) -> dict[int, dict[str, float]]:
    """Metrics of every step of a run that ends after ``steps``."""
    run, _, own = TRAINERS[name]
    log = folder / "metrics.jsonl"
    settings = {
        "data.train_files": file, "data.val_files": file, "data.train_batch_size": 4, "data.num_workers": 0,
        "data.max_length": 64, "model.path": path, "engine.dtype": "float32", "optim.lr": LR,
        "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]", "optim.override_optimizer_config": f"{{eps: {EPS}}}",
        "optim.lr_scheduler_type": "constant", "trainer.total_training_steps": steps, "trainer.save_freq": 1,
        "trainer.test_freq": 1, "trainer.controller": "local", "trainer.device": "cpu", "trainer.logger": "[file]",
        "trainer.default_local_dir": folder / "run", "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }  # fmt: skip
    settings |= own | {key.replace("__", "."): value for key, value in changes.items()}
    log.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        config: Any = compose([f"{key}={value}" for key, value in settings.items()], name)
        run(config)
    return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}


LAYOUTS = {
    "packed, by tokens": {"data__use_dynamic_bsz": "true", "data__max_token_len_per_gpu": 128},
    "padded": {
        "data__use_dynamic_bsz": "false",
        "data__micro_batch_size_per_gpu": 4,
        "model__use_remove_padding": "false",
    },
}
TWO_RANKS = {"trainer__controller": "ray", "trainer__n_gpus_per_node": 2}


def agree(name: str, family: str, folder: Any, **changes: Any) -> None:
    """Run two steps, and compare with plain Transformers: losses, gradient, all weights, rewards of the export."""
    path = tiny_vision_model_dir(folder / "model", family)
    file = write_parquet(folder / "pairs.parquet", pairs())
    steps = trained(name, path, file, folder, STEPS, **changes)
    data, plain = opened(path, file), TRAINERS[name][1](path)
    start = {name: weight.detach().clone() for name, weight in plain.weights().items()}
    losses, norm = plain_steps(plain, data)
    assert [steps[n]["train/loss"] for n in (1, 2)] == pytest.approx(losses, rel=1e-5)
    assert steps[1]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert steps[1]["val/loss"] == pytest.approx(losses[1], rel=1e-5)
    auto = AutoModelForImageTextToText if name == "dpo_trainer" else sequence_classifier(family)
    exported: Any = auto.from_pretrained(folder / "run" / "global_step_2" / "huggingface")
    weights = dict(exported.named_parameters())
    assert weights.keys() == start.keys()
    for key, weight in plain.weights().items():
        assert_close(weights[key], weight, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
        assert ".visual." not in key or key.endswith("k.bias") or not torch.equal(weight, start[key]), key
    if name == "rm_trainer":
        with torch.no_grad():
            for number, which in ((0, 0), (1, 1)):
                ids, _, more = side(data, number, which)
                assert_close(exported(input_ids=ids[None], **more).logits[0, 0], plain.reward(data, number, which))
        merge(folder / "run" / "global_step_2", folder / "merged")
        merged = sequence_classifier(family).from_pretrained(folder / "merged")
        assert all(torch.equal(weights[key], weight) for key, weight in merged.named_parameters())


CASES = [
    ("qwen3_vl", "packed, by tokens"),
    *(pytest.param(family, "packed, by tokens", marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen2_5_vl")),
    pytest.param("qwen3_vl", "padded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_steps_are_those_of_plain_pytorch(name, family, layout, tmp_path):
    agree(name, family, tmp_path, **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_steps_on_two_ranks(name, family, tmp_path, ray_cluster):
    agree(name, family, tmp_path, **LAYOUTS["packed, by tokens"], **TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_resumed_run_continues_where_it_stopped(name, path, tmp_path):
    file = write_parquet(tmp_path / "pairs.parquet", pairs())
    straight = trained(name, path, file, tmp_path, 3, trainer__default_local_dir=tmp_path / "straight")
    trained(name, path, file, tmp_path, 2)
    rest = trained(name, path, file, tmp_path, 3)
    assert list(rest) == [3]
    assert numbers_of(rest[3]) == numbers_of(straight[3])
