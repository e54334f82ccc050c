"""LoRA adapters and images in the real SGLang, against the trainer; by ``make test-sglang``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout.images_of_engines import check_adapters, check_log_probs
from tests.workers.rollout.test_vllm_lora import RANK, change, compared, rollout_of, trainer_of
from verl.testing.models import tiny_model_dir
from verl.workers.rollout.sglang_rollout import SGLangRollout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here; `make test-sglang` has it"
)


@pytest.mark.parametrize(
    ("mode", "target_modules"),
    [("sync", ("q_proj", "up_proj", "down_proj")), pytest.param("async", "all-linear", marks=pytest.mark.slow)],
)
def test_each_update_sends_the_adapters_alone(mode: str, target_modules: Any, tmp_path: Path) -> None:
    """Counted by hand: layers q, o 64x(4*32), k, v 64x(2*32), gate, up, down 64x128, two of each, in fp32.

    SGLang gets k, v and gate with q and up, but o only if it is trained.
    """
    path = tiny_model_dir(tmp_path / "model", "qwen3", head_dim=32)
    trainer = trainer_of(path, target_modules, use_rslora=mode == "async")
    q_or_o, k_and_v, mlp = 64 + 128, 2 * (64 + 64), 3 * (64 + 128)
    adapters = 2 * RANK * 4 * ((2 if mode == "async" else 1) * q_or_o + k_and_v + mlp)
    base = sum(tensor.nbytes for _, tensor in trainer.adapted_weights().base())
    sent = []
    with rollout_of(SGLangRollout, path, target_modules, name="sglang", mode=mode) as rollout:
        for step in range(3):
            change(trainer, step)
            compared(rollout, trainer)
            sent.append(rollout.sent_bytes)
    assert sent == [base + adapters, adapters, adapters]


# SGLang takes pictures of Qwen2.5-VL with other patches than of 14 pixels for what a tower has made of them.
PATCHES = {"patch": 14, "side": 4}


@pytest.mark.parametrize(
    ("family", "mode", "rows"),
    [
        ("qwen2_5_vl", "sync", "pictures"),
        pytest.param("qwen2_5_vl", "async", "films", marks=pytest.mark.slow),
        pytest.param("qwen2_vl", "sync", "films", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "async", "pictures", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "sync", "films", marks=pytest.mark.slow),
    ],
)
def test_log_probs_of_images_are_the_trainers(family: str, mode: str, rows: str, tmp_path: Path) -> None:
    check_log_probs("sglang", family, mode, rows, tmp_path, **PATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [("qwen2_5_vl", "async"), ("qwen3_vl", "sync")])
def test_adapters_of_the_language_model_are_applied_by_sglang(family: str, mode: str, tmp_path: Path) -> None:
    check_adapters("sglang", family, mode, tmp_path, **PATCHES)
