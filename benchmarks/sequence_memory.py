"""Memory of one training step on one long sequence: on one rank, and on ranks that share it (Ulysses), on CPUs.

Counted is how far the resident memory of each rank grows at most during a step, after a first step on a few tokens has
allocated weights, gradients and optimizer state. Losses must agree. ::

    python -m benchmarks.sequence_memory [--tokens 32768] [--ranks 1 2] [--gradient_checkpointing]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.logprob_memory import memory_bytes
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.losses import sft_loss

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 20,
}


def one_sequence(tokens: int) -> DataProto:
    """A prompt of a quarter of the tokens, and a response of the rest."""
    ids = torch.randint(2, 104, (1, tokens), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    response = tokens - tokens // 4
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": torch.arange(tokens).unsqueeze(0),
        "responses": ids[:, -response:],
        "response_mask": ones[:, -response:],
    }
    return DataProto.from_dict(tensors=columns)


def on_rank(rank: int, ranks: int, folder: str, tokens: int, checkpointing: bool) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store_{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=f"{folder}/model", enable_gradient_checkpointing=checkpointing),
        engine_config=FSDPEngineConfig(dtype="fp32", ulysses_sequence_parallel_size=ranks),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5),
        device_name="cpu",
    )
    engine.initialize()
    micro = MicroBatchConfig(micro_batch_size_per_gpu=1)
    with engine.train_mode():
        engine.train_batch(one_sequence(64), sft_loss, micro)
        data = one_sequence(tokens)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before, start = memory_bytes("/proc/self/status", "VmRSS"), time.process_time()
        metrics = engine.train_batch(data, sft_loss, micro)
        growth, seconds = memory_bytes("/proc/self/status", "VmHWM") - before, time.process_time() - start
    found = {"bytes": growth, "seconds": seconds, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
    Path(f"{folder}/{ranks}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(ranks: int, folder: str, tokens: int, checkpointing: bool) -> list[dict[str, Any]]:
    """What each rank counted."""
    mp.start_processes(on_rank, (ranks, folder, tokens, checkpointing), ranks, start_method="spawn")
    return [json.loads(Path(f"{folder}/{ranks}_{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks that share it")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="keep only the input of each layer")
    args = parser.parse_args()
    print(f"\none sequence of {args.tokens} tokens, gradient checkpointing {args.gradient_checkpointing}\n")
    print("| ranks that share it | growth of memory per rank, MiB | CPU seconds per rank | loss | gradient norm |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tiny_model_dir(f"{folder}/model", "qwen3", **SHAPE)
        for ranks in args.ranks:
            found = measured(ranks, folder, args.tokens, args.gradient_checkpointing)
            memory = max(one["bytes"] for one in found) / 2**20
            seconds = max(one["seconds"] for one in found)
            loss, norm = found[0]["loss"], found[0]["grad_norm"]
            print(f"| {ranks} | {memory:.0f} | {seconds:.1f} | {loss:.6f} | {norm:.5f} |", flush=True)


if __name__ == "__main__":
    main()
