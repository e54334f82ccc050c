"""Worker groups of one rank in this process, and prompts for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.workers.support import P, ragged_batch
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.config import FSDPEngineConfig

FP32 = FSDPEngineConfig(dtype="fp32")
N = 2
"""Samples of each prompt."""


def start(worker: type, **arguments: Any) -> LocalWorkerGroup:
    group = LocalWorkerGroup(ray_cls_with_init=LocalWorkerGroup.describe(worker, device_name="cpu", **arguments))
    group.init_model()
    return group


def prompts(count: int = 4, step: int = 1) -> DataProto:
    batch = ragged_batch(count)
    return DataProto.from_dict(
        tensors={"input_ids": batch.batch["prompts"], "attention_mask": batch.batch["attention_mask"][:, :P]},
        non_tensors={
            "uid": np.array([f"{i // N}" for i in range(count)], dtype=object),
            "sample_index": np.arange(count) % N,
        },
        meta_info={"global_steps": step, "validate": False},
    )
