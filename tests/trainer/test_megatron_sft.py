"""sft_trainer with engine.strategy=megatron: the numbers of one local rank under FSDP, and its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.model_merger import merge
from verl.testing.models import tiny_model_dir
from verl.testing.preferences import numbers_of, preference_run
from verl.trainer.sft_trainer import run_sft

pytest.importorskip("verl.workers.engine.megatron.library")

SETTINGS = {
    "data__prompt_key": "prompt",
    "data__response_key": "chosen",
    # AdamW's step is lr · m / (√v + ε): with the usual tiny ε the rounding of a gradient near 0 becomes a step of lr.
    "optim__override_optimizer_config": "{eps:1e-4}",
}
MEGATRON = {
    "trainer__controller": "ray",
    "trainer__n_gpus_per_node": 2,
    "engine__strategy": "megatron",
    "megatron__dtype": "float32",
    "megatron__tensor_model_parallel_size": 2,
    "data__micro_batch_size_per_gpu": 4,
}


def test_two_tensor_parallel_ranks_give_the_numbers_and_weights_of_one(tmp_path: Path, monkeypatch, ray_cluster):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    train = preference_run(run_sft, "sft_trainer", tmp_path, tiny_model_dir(tmp_path / "model"), log)
    local, found = train(3, "local", **SETTINGS), train(3, "megatron", **SETTINGS, **MEGATRON)
    assert local.keys() == found.keys()
    for step in local:
        expected, ours = numbers_of(local[step]), numbers_of(found[step])
        assert expected.keys() == ours.keys()
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=1e-5), (step, name)
    assert abs(local[3]["train/loss"] - local[1]["train/loss"]) > 1e-3
    merge(tmp_path / "megatron" / "global_step_3", tmp_path / "merged")
    expected = load_file(tmp_path / "local" / "global_step_3" / "huggingface" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert expected.keys() == merged.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=name)
