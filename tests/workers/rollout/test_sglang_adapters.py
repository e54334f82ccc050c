"""LoRA adapters and images in the real SGLang, against the trainer; by ``make test-sglang``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_models import DENSE_FAMILIES
from tests.workers.rollout.images_of_engines import check_a_run, check_adapters, check_log_probs
from tests.workers.rollout.test_vllm_lora import RANK, change, compared, rollout_of, trainer_of
from verl.testing.models import tiny_model_dir
from verl.workers.rollout.sglang_rollout import SGLangRollout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here; `make test-sglang` has it"
)


@pytest.mark.parametrize(
    ("target_modules", "o"),
    [(("q_proj", "up_proj", "down_proj"), 0), pytest.param("all-linear", 1, marks=pytest.mark.slow)],
)
def test_each_update_sends_the_adapters_alone(target_modules: Any, o: int, tmp_path: Path) -> None:
    """Counted by hand: layers q, o 64x(4*32), k, v 64x(2*32), gate, up, down 64x128, two of each, in fp32.

    SGLang gets k, v and gate with q and up, but o only if it is trained.
    """
    path = tiny_model_dir(tmp_path / "model", "qwen3", head_dim=32)
    trainer = trainer_of(path, target_modules, use_rslora=True)
    q_or_o, k_and_v, mlp = 64 + 128, 2 * (64 + 64), 3 * (64 + 128)
    adapters = 2 * RANK * 4 * ((1 + o) * q_or_o + k_and_v + mlp)
    base = sum(tensor.nbytes for _, tensor in trainer.adapted_weights().base())
    sent = []
    with rollout_of(SGLangRollout, path, target_modules, name="sglang") as rollout:
        for step in range(3):
            change(trainer, step)
            compared(rollout, trainer)
            sent.append(rollout.sent_bytes)
    assert sent == [base + adapters, adapters, adapters]


# SGLang takes pictures of Qwen2.5-VL with other patches than of 14 pixels for what a tower has made of them.
PATCHES = {"patch": 14, "side": 4}


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("qwen2_5_vl", "pictures"),
        *(pytest.param(family, "films", marks=pytest.mark.slow) for family in DENSE_FAMILIES),
    ],
)
def test_log_probs_of_images_are_the_trainers(family: str, rows: str, tmp_path: Path) -> None:
    check_log_probs("sglang", family, rows, tmp_path, **PATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters_of_the_language_model_are_applied_by_sglang(family: str, tmp_path: Path) -> None:
    check_adapters("sglang", family, tmp_path, **PATCHES)


@pytest.mark.slow
def test_a_run_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    size = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 1}
    check_a_run("sglang", "qwen2_5_vl", tmp_path, size, **PATCHES)
