"""How often this process waits for the device in passes and updates: each time the device runs out of work.

The device is PyTorch's meta device, whose tensors have no values. What would wait for a GPU is counted and answered by
ones: a number that is read, a copy to the CPU, a copy to the device that is not queued. Anything else that looks at
values raises.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.support import make_engine, ragged_batch, with_log_probs
from verl.backends import backend_for
from verl.testing.models import tiny_model, tiny_model_dir
from verl.utils.transformers_private import use_attention
from verl.workers.config import ActorConfig
from verl.workers.engine import LossFunction, MicroBatchConfig
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.model.headed import HeadedModel
from verl.workers.engine.optimizer import build_optimizer, build_scheduler
from verl.workers.losses import OwnForwardLoss, PolicyLoss, TokenRecord
from verl.workers.packed_attention import PACKED_ATTENTION
from verl.workers.routers import Routers

META = torch.device("meta")
aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Counts by file of ours what waits for the device inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func is aten._local_scalar_dense.default and source is not None and source.is_meta:
            self._count()
            return torch.ones((), dtype=source.dtype).item()
        if func is aten._to_copy.default and source is not None:
            target = kwargs.get("device") or source.device
            if source.is_meta and target.type == "cpu":
                self._count()
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and target.type == "meta" and not kwargs.get("non_blocking"):
                self._count()
        return func(*args, **kwargs)

    def _count(self) -> None:
        ours = [frame for frame in traceback.extract_stack() if "/verl/" in frame.filename]
        function = next(frame for frame in reversed(ours) if not frame.name.startswith("<"))
        self.of[f"{Path(function.filename).name}:{function.name}"] += 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> FSDPEngine:
    made = make_engine(tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3"))
    model = HeadedModel(tiny_model("qwen3").to(META), "lm_head").eval()
    use_attention(model.hf, PACKED_ATTENTION)
    made.model, made.device, made.backend, made.routers = model, META, backend_for(META), Routers(model)
    config = made.optimizer_config
    config = type(config)(optimizer="SGD")  # meta has no fused kernels
    made.optimizer = build_optimizer(model.parameters(), config)
    made.scheduler = build_scheduler(made.optimizer, config)
    return made


MICRO = MicroBatchConfig(micro_batch_size_per_gpu=4)
"""Two passes for the eight rows."""


def waits(engine: FSDPEngine, loss: LossFunction | None = None) -> Counter[str]:
    """Of a pass without gradients, or of an optimizer step by ``loss``."""
    batch = with_log_probs(ragged_batch(), torch.zeros(8, 8))
    with Waits() as counted:
        if loss is None:
            engine.infer_batch(batch, {"log_probs", "entropy"}, MICRO)
        else:
            if isinstance(loss, OwnForwardLoss):
                batch.pop(["old_log_probs"])
            engine.train_batch(TokenRecord(8).numbered(batch), loss, MICRO)
    return counted.of


def test_a_pass_waits_for_its_outputs_alone(engine):
    assert waits(engine).total() == 2


@pytest.mark.parametrize("kind", ["policy", "on-policy"])
def test_an_update_waits_for_four_numbers_however_many_micro_batches_it_has(engine, kind):
    loss = PolicyLoss(ActorConfig(entropy_coeff=0.01, use_kl_loss=True))
    loss = loss if kind == "policy" else OwnForwardLoss(loss, TokenRecord(8))
    # Tokens of all ranks, whether losses are finite, metrics, the gradient's norm.
    once = {"loss.py:from_batch": 1, "non_finite.py:problems": 1, "loss.py:_read": 1, "optimizer.py:clip_gradients": 1}
    assert waits(engine, loss) == once
