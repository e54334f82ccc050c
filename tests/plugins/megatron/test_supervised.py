"""sft_trainer, rm_trainer and dpo_trainer with engine.strategy=megatron: the numbers and weights of one local rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.preferences import numbers_of, preference_run
from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.trainer.dpo_trainer import run_dpo
from verl.trainer.rm_trainer import run_rm
from verl.trainer.sft_trainer import run_sft

pytest.importorskip("verl.plugins.megatron.library")

RUNS: dict[str, Callable[[Any], None]] = {"sft": run_sft, "rm": run_rm, "dpo": run_dpo}
# AdamW's step is lr · m / (√v + ε): with the usual tiny ε the rounding of a gradient near 0 becomes a step of lr.
SMALL_STEPS = {"optim__override_optimizer_config": "{eps:1e-4}"}
ONE_RANK = {"engine__strategy": "megatron", "megatron__dtype": "float32", "data__micro_batch_size_per_gpu": 4}
MEGATRON = ONE_RANK | {"trainer__controller": "ray", "trainer__n_gpus_per_node": 2}
TENSOR = MEGATRON | {"megatron__tensor_model_parallel_size": 2}
PIPELINE = MEGATRON | {"megatron__pipeline_model_parallel_size": 2}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, dict[str, float]]]:
    """A function that trains by a command; the reference of ``dpo`` is another model than the one that is trained."""
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    model = tiny_model_dir(tmp_path / "model")
    own = {
        "sft": {"data__prompt_key": "prompt", "data__response_key": "chosen"},
        "rm": {},
        "dpo": {"ref__path": tiny_model_dir(tmp_path / "reference", seed=1)},
    }

    def start(command: str, steps: int, save_to: str, **changes: object) -> dict[int, dict[str, float]]:
        run = preference_run(RUNS[command], f"{command}_trainer", tmp_path, model, log)
        return run(steps, save_to, **SMALL_STEPS, **own[command], **changes)

    return start


def rounding(command: str, name: str) -> float:
    """How far apart a number may lie that is a difference of larger ones."""
    if command == "dpo" and name.endswith(("/chosen", "/rejected", "/margin")):
        return 1e-6  # β = 0.1 times differences of sums of log-probs, of size 30, where fp32 rounds by 2e-6
    return 0.0


CASES = [
    pytest.param("sft", ONE_RANK, id="sft one rank"),
    *(
        pytest.param(command, layout, id=f"{command} {name} 2", marks=pytest.mark.slow)
        for command in RUNS
        for name, layout in (("tp", TENSOR), ("pp", PIPELINE))
    ),
]


@pytest.mark.parametrize(("command", "layout"), CASES)
def test_megatron_gives_the_numbers_and_weights_of_fsdp(tmp_path, train, request, command, layout):
    if layout is not ONE_RANK:
        request.getfixturevalue("ray_cluster")
    local, found = train(command, 3, "local"), train(command, 3, "megatron", **layout)
    assert local.keys() == found.keys() == {1, 2, 3}
    for step in local:
        expected, ours = numbers_of(local[step]), numbers_of(found[step])
        assert expected.keys() == ours.keys()
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=rounding(command, name)), (step, name)
    assert abs(local[3]["train/loss"] - local[1]["train/loss"]) > 1e-3
    merge(tmp_path / "megatron" / "global_step_3", tmp_path / "merged")
    expected = load_file(tmp_path / "local" / "global_step_3" / "huggingface" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert expected.keys() == merged.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_resumed_run_goes_on_bit_by_bit(train, ray_cluster, command):
    # 24 rows in batches of 8 make an epoch of 3 steps: the break after step 2 is within it.
    straight = train(command, 4, "straight", **PIPELINE)
    train(command, 2, "stopped", **PIPELINE)
    rest = train(command, 4, "stopped", **PIPELINE)
    assert rest.keys() == {3, 4}
    for step, metrics in rest.items():
        assert numbers_of(metrics) == numbers_of(straight[step])
    assert straight[4]["train/loss"] != straight[2]["train/loss"]
