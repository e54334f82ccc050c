"""LoRA adapters that the real vLLM applies by itself, against the trainer; by ``make test-vllm``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.workers.groups import FP32
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm
from verl.config import LoRAConfig
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, prompt_batch
from verl.utils import hf_tokenizer
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.rollout.remote import RemoteRollout
from verl.workers.rollout.vllm_rollout import VLLMRollout

pytestmark = needs_vllm
RANK = 4
SETTINGS: dict[str, Any] = {"name": "vllm", "engine_kwargs": {"vllm": KWARGS}}


def trainer_of(path: str, target_modules: str | tuple[str, ...] = "all-linear", **lora: Any) -> Any:
    model = HFModelConfig(
        path=path, lora_rank=RANK, lora_alpha=8, target_modules=target_modules, lora=LoRAConfig(**lora)
    )
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model,
        engine_config=FP32,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        device_name="cpu",
    )
    engine.initialize()
    return engine


@contextmanager
def rollout_of(
    engine: type[RemoteRollout], path: str, target_modules: str | tuple[str, ...] = "all-linear", **settings: Any
) -> Iterator[RemoteRollout]:
    config = RolloutConfig(
        prompt_length=8,
        response_length=12,
        dtype="float32",
        tensor_model_parallel_size=1,
        enforce_eager=True,
        merge_adapters=False,
        **settings,
    )
    model = HFModelConfig(path=path, lora_rank=RANK, target_modules=target_modules)
    rollout = engine(config, model, hf_tokenizer(path), "cpu")
    try:
        yield rollout
    finally:
        rollout._end_engine()


def change(trainer: Any, seed: int) -> None:
    """What an update does: other adapters under another version."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    trainer.weight_version += 1


def compared(rollout: RemoteRollout, trainer: Any) -> None:
    """The log-probs of vLLM are those of the trainer, whose merged weights are another road to the same numbers."""
    prompts = prompt_batch(PROMPTS)
    with trainer.eval_mode(), rollout.awake(trainer.adapted_weights(), trainer.weight_version):
        found = rollout.generate_sequences(prompts)
    batch = prompts.select(batch_keys=[]) | found
    expected = trainer.infer_batch(batch, {"log_probs"}, MicroBatchConfig())["log_probs"]
    assert_close(batch.batch["rollout_log_probs"], expected, atol=1e-5, rtol=0)
    assert set(batch.non_tensor_batch["weight_version"]) == {trainer.weight_version}


def test_each_update_sends_the_adapters_alone(tmp_path: Path) -> None:
    """Counted by hand: layers q, o 64x(4*32), k, v 64x(2*32), gate, up, down 64x128, two of each, in fp32."""
    path = tiny_model_dir(tmp_path / "model", "qwen3", head_dim=32)
    trainer = trainer_of(path, use_rslora=True)
    adapters = 2 * RANK * 4 * (2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 128))
    base = sum(tensor.nbytes for _, tensor in trainer.adapted_weights().base())
    sent = []
    with rollout_of(VLLMRollout, path, **SETTINGS) as rollout:
        for step in range(4):
            change(trainer, step)
            compared(rollout, trainer)
            sent.append(rollout.sent_bytes)
    assert sent == [base + adapters, adapters, adapters, adapters]


@pytest.mark.slow
def test_an_engine_that_was_lost_gets_the_base_again(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", "qwen3", head_dim=32)
    trainer = trainer_of(path)
    change(trainer, 0)
    with rollout_of(VLLMRollout, path, **SETTINGS) as rollout:
        compared(rollout, trainer)
        whole = rollout.sent_bytes
        rollout._engine.server._guard.kill()
        change(trainer, 1)
        compared(rollout, trainer)
        assert (rollout.restarts, rollout.sent_bytes) == (1, whole)
