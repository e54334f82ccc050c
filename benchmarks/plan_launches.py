"""Operations of a layer's passes in the training engines, as `verl plan` counts what the host starts.

A model of two and one of four layers are trained on one CPU rank; half of the difference of what PyTorch dispatches,
views and empty tensors aside, is that of a layer. On a GPU fused kernels make it fewer. ::

    python -m benchmarks.plan_launches
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.plan_accuracy import EXPERT_SHAPE, SMALL_SHAPE, batch_of
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, McoreEngineConfig
from verl.plugins.plan.passes import Rows
from verl.testing.models import tiny_model_dir
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.losses import sft_loss

_VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "record_stream", "reshape", "select", "set_",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip


class _Dispatched(TorchDispatchMode):
    """Counts dispatched operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in _VIEWS
        return func(*args, **(kwargs or {}))


def _dispatched(work: Callable[[], object]) -> int:
    with _Dispatched() as operations:
        work()
    return operations.count


def _count(_: int, strategy: str, layers: int, experts: int, path: str, counts: Any) -> None:
    """Put the operations of a forward pass, and of one with its backward pass."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 1), rank=0, world_size=1)
    shape: dict[str, Any] = {**SMALL_SHAPE, "num_hidden_layers": layers}
    if experts:
        shape |= {**EXPERT_SHAPE, "num_hidden_layers": layers, "num_experts": experts}
    tiny_model_dir(f"{path}/model", "qwen3_moe" if experts else "qwen3", **shape)
    placement = McoreEngineConfig if strategy == "megatron" else FSDPEngineConfig
    engine: Any = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=HFModelConfig(path=f"{path}/model", enable_gradient_checkpointing=False),
        engine_config=placement(dtype="bfloat16"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5),
        device_name="cpu",
    )
    engine.initialize()
    data, micro = batch_of(Rows(16, 48), shape["vocab"]), MicroBatchConfig(micro_batch_size_per_gpu=4)
    with engine.train_mode():
        engine.train_batch(data, sft_loss, micro)
        engine.optimizer_zero_grad()
        both = _dispatched(lambda: engine.forward_backward_batch(data, sft_loss, micro))
    with engine.eval_mode():
        counts.put((_dispatched(lambda: engine.infer_batch(data, {"log_probs"}, micro)), both))


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| engine | experts of a layer | forward | forward and backward |\n|---|---|---|---|")
    for strategy in ("fsdp2", "megatron"):
        for experts in (0, 8, 16):
            of_depths = []
            for layers in (2, 4):
                counts = mp.get_context("spawn").SimpleQueue()
                with tempfile.TemporaryDirectory() as path:
                    mp.start_processes(_count, (strategy, layers, experts, path, counts), 1, start_method="spawn")
                    of_depths.append(counts.get())
            forward, both = ((more - fewer) / 2 for fewer, more in zip(*of_depths, strict=True))
            print(f"| {strategy} | {experts} | {forward:g} | {both:g} |", flush=True)


if __name__ == "__main__":
    main()
