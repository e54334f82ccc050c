"""Engines of strategy=megatron, on CPUs."""

from __future__ import annotations

from typing import Any

from tests.workers.support import EPS, LR, P, ragged_batch
from verl.config import FSDPOptimizerConfig, HFModelConfig, McoreEngineConfig
from verl.protocol import DataProto
from verl.workers.config import ActorConfig
from verl.workers.engine import BaseEngine, EngineRegistry

CONFIG = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
TP = {"tensor_model_parallel_size": 2}


def batch_that_drew_padding() -> DataProto:
    """A ragged batch; in row 1 the policy drew the padding token, whose embedding is 0 and is not trained."""
    batch = ragged_batch()
    batch.batch["input_ids"][1, P + 2] = 0
    batch.batch["responses"][1, 2] = 0
    return batch


def megatron_engine(
    path: str,
    model_type: str = "language_model",
    trained: bool = True,
    dtype: str = "fp32",
    device_name: str = "cpu",
    frozen: tuple[str, ...] = (),
    optimizer: dict[str, Any] | None = None,
    **settings: Any,
) -> BaseEngine:
    """An initialised engine, beside others of any layout."""
    model = {key: settings.pop(key) for key in list(settings) if key in HFModelConfig.__pydantic_fields__}
    optimizer = optimizer or {"lr": LR, "weight_decay": 0.1, "override_optimizer_config": {"eps": EPS}}
    engine = EngineRegistry.new(
        model_type,
        "megatron",
        model_config=HFModelConfig(path=path, **model),
        engine_config=McoreEngineConfig(dtype=dtype, forward_only=not trained, **settings),
        optimizer_config=FSDPOptimizerConfig(**optimizer) if trained else None,
        device_name=device_name,
        frozen=frozen,
    )
    engine.initialize()
    return engine
