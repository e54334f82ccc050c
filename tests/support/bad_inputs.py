"""Inputs that a user gets wrong, and what the message must say.

``tests/trainer/test_bad_inputs.py`` asserts it; ``docs/generate/errors.py`` prints each message
into ``docs/errors.md``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from verl.testing.models import tiny_model_dir


@dataclass(frozen=True)
class BadInput:
    """One mistake."""

    title: str
    make: Callable[[Path], list[str]]
    """Builds the files under a folder and returns the command line's overrides."""
    says: tuple[str, ...]
    """Each of these must be in the message."""


def _changed(**changes: object) -> Callable[[Path], list[str]]:
    return lambda folder: overrides(make_tiny_run(folder), folder, **changes)


def _rows(rows: list[dict], **changes: object) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        paths = make_tiny_run(folder) | {"train": write_jsonl(folder / "bad.jsonl", rows)}
        return overrides(paths, folder, **changes)

    return make


def _tokenizer(**fields: object) -> Callable[[Path], list[str]]:
    """A model folder whose tokenizer_config.json has other ``fields`` (None removes one)."""

    def make(folder: Path) -> list[str]:
        paths = make_tiny_run(folder)
        (Path(paths["model"]) / "chat_template.jinja").unlink(missing_ok=True)
        config = Path(paths["model"]) / "tokenizer_config.json"
        settings = json.loads(config.read_text()) | fields
        config.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        return overrides(paths, folder)

    return make


def _scorer(code: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        paths = make_tiny_run(folder)
        (folder / "my_reward.py").write_text(code)
        return overrides(paths, folder, custom_reward_function__path=str(folder / "my_reward.py"))

    return make


def _no_reward_column(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "prompt"} | {"question": "what?"}


def _broken_model(folder: Path) -> list[str]:
    paths = make_tiny_run(folder)
    shutil.rmtree(paths["model"])
    return overrides(paths, folder)


def _cut_weights(folder: Path) -> list[str]:
    paths = make_tiny_run(folder)
    file = Path(paths["model"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200_000])
    return overrides(paths, folder)


def _nan_weights(folder: Path) -> list[str]:
    paths = make_tiny_run(folder)
    file = Path(paths["model"]) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return overrides(paths, folder)


def _no_tokenizer(folder: Path) -> list[str]:
    paths = make_tiny_run(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (Path(paths["model"]) / name).unlink()
    return overrides(paths, folder)


def _tokenizer_too_large(folder: Path) -> list[str]:
    paths = make_tiny_run(folder)
    other = tiny_model_dir(folder / "other", tokenizer="bpe")
    return overrides(paths, folder, actor_rollout_ref__model__tokenizer_path=other)


def _unwritable(folder: Path) -> list[str]:
    # A file where a folder should be: no one can write into it, whatever the permissions of the user.
    paths = make_tiny_run(folder)
    (folder / "occupied").write_text("a file")
    where = str(folder / "occupied" / "checkpoints")
    return overrides(paths, folder, trainer__default_local_dir=where, trainer__save_freq=1)


BAD_INPUTS = [
    BadInput("missing data file", _changed(data__train_files="nowhere/train.parquet"), ("nowhere/train.parquet",)),
    BadInput(
        "missing column",
        _rows([_no_reward_column(row) for row in countdown_rows(8)]),
        ("prompt", "question", "Set prompt_key"),
    ),
    BadInput("empty data set", _rows([]), ("bad.jsonl", "empty")),
    BadInput(
        "prompts all too long",
        _changed(data__max_prompt_length=3, data__filter_overlong_prompts="true"),
        ("max_prompt_length", "3"),
    ),
    BadInput(
        "fewer prompts than a batch", _rows(countdown_rows(3)), ("data.train_batch_size", "4", "3")
    ),
    BadInput(
        "unknown key",
        _changed(actor_rollout_ref__rollout__temprature=0.7),
        ("temprature", "actor_rollout_ref.rollout.temperature"),
    ),
    BadInput(
        "indivisible batch sizes",
        _changed(actor_rollout_ref__actor__ppo_mini_batch_size=3),
        ("ppo_mini_batch_size", "3", "train_batch_size"),
    ),
    BadInput("missing model folder", _broken_model, ("model",)),
    BadInput("cut weight file", _cut_weights, ("model.safetensors is cut", "200000 bytes", "model.path")),
    BadInput("weights with NaN", _nan_weights, ("model.layers.1.mlp.up_proj.weight (1 of 8192 values)", "not finite")),
    BadInput("folder without tokenizer", _no_tokenizer, ("holds no tokenizer", "model.tokenizer_path")),
    BadInput("tokenizer without chat template", _tokenizer(chat_template=None), ("chat template",)),
    BadInput("tokenizer of another model", _tokenizer_too_large, ("has id 383", "104 rows", "(tokenizer_path)")),
    BadInput(
        "tokenizer without pad token and end token",
        _tokenizer(pad_token=None, eos_token=None),
        ("pad token",),
    ),
    BadInput(
        "more ranks than resources",
        _changed(
            trainer__controller="ray",
            trainer__n_gpus_per_node=64,
            data__train_batch_size=16,
            actor_rollout_ref__actor__ppo_mini_batch_size=16,
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=1,
        ),
        ("64", "Set n_gpus_per_node="),
    ),
    BadInput("unwritable folder", _unwritable, ("occupied", "trainer.default_local_dir")),
    BadInput(
        "a scorer that raises",
        _scorer(
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return float(extra_info['difficulty'])\n"
        ),
        ("difficulty", "KeyError", "my_reward.py", "max_error_rate"),
    ),
    BadInput(
        "a scorer that returns NaN",
        _scorer(
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float('nan')\n"
        ),
        ("nan", "max_error_rate"),
    ),
]  # fmt: skip
