"""Build Llama-3.1-70B without weights, as FSDP engines and rollout engines do before they read any.

    python -m benchmarks.skeletons [--layers 20 40 80 160] [--ranks 64]

Weights are on the meta device, and the ranks are PyTorch's fake process group, in which this process is one rank. For
each number of layers (the model has 80) the processor seconds are given of the modules, of dividing them by FSDP2 over
the ranks, of listing each weight's part of this rank, and of the table by which a rollout engine checks weights; and
the memory that all of it takes. Work that grows faster than the layers would show in the last rows.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

from verl.config import FSDPEngineConfig
from verl.utils.model import empty_causal_lm
from verl.utils.sharded_tensor import local_part
from verl.workers.engine.fsdp.sharding import shard_model
from verl.workers.engine.model.headed import HeadedModel, own_state
from verl.workers.rollout.weights import ExpectedWeights


def config_of(layers: int) -> LlamaConfig:
    """The shapes of Llama-3.1-70B, with another number of layers."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )


def anonymous_megabytes() -> float:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


def measure(layers: int, ranks: int) -> str:
    """Build everything once; return a row of the table."""
    before, times = anonymous_megabytes(), [time.process_time()]
    hf = empty_causal_lm(config_of(layers), torch.float32, torch.device("meta"))
    times.append(time.process_time())
    expected = ExpectedWeights(hf, torch.bfloat16)
    times.append(time.process_time())
    model = HeadedModel(hf, "lm_head")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    shard_model(model, FSDPEngineConfig(dtype="fp32"), mesh)
    times.append(time.process_time())
    parts = [local_part(tensor) for tensor in own_state(model).values()]
    times.append(time.process_time())
    assert len(parts) == len(expected.shapes) - sum(1 for _ in hf.named_buffers())
    modules, table, divided, listed = (end - start for start, end in pairwise(times))
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    seconds = " | ".join(f"{value:.3f}" for value in (modules, divided, listed, table))
    return f"| {layers} | {billions:.1f} B | {seconds} | {anonymous_megabytes() - before:.1f} MB |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80, 160], help="default: 20 40 80 160")
    parser.add_argument("--ranks", type=int, default=64, help="of FSDP (default: 64)")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    measure(2, args.ranks)  # what is imported or compiled once is not of the model
    print("| layers | parameters | modules | FSDP2 | parts | table | memory |\n|---|---|---|---|---|---|---|")
    for layers in args.layers:
        print(measure(layers, args.ranks), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
