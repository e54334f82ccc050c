"""Write a step as verl 0.8 does under FSDP, with PyTorch's own sharded tensors; for tests.

``python -m tests.support.public_checkpoint MODEL FOLDER --strategy fsdp|fsdp2 --ranks 2`` trains the model in MODEL for
two steps on random tokens and saves ``FOLDER/global_step_2``, and in ``whole.pt`` beside it the same weights and
moments in one piece. Optimizer and schedule are AdamW with lr 0.01 and a constant rate.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM

STEPS = 2


def save_public_checkpoint(model: str, root: Path, strategy: str, ranks: int = 2) -> Path:
    """Train and save on ``ranks`` processes; returns the step's folder."""
    folder = root / f"global_step_{STEPS}" / "actor"
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (model, folder, strategy, ranks, port)
    mp.start_processes(_on_rank, arguments, nprocs=ranks, start_method="forkserver")
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    return folder.parent


def _on_rank(rank: int, path: str, folder: Path, strategy: str, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    layers = type(model.model.layers[0])
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained: nn.Module = model
    else:
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={layers})
        trained = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=False)
        FSDP.set_state_dict_type(
            trained, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )
    optimizer, of_plain = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.0) for m in (trained, plain))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    tokens = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        for module, steps in ((trained, optimizer), (plain, of_plain)):
            module(input_ids=tokens, labels=tokens).loss.backward()
            steps.step()
            steps.zero_grad()
        scheduler.step()
    extra = {
        "lr_scheduler": scheduler.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()},
    }
    files = {"model": trained.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    for kind, state in files.items():
        torch.save(state, folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        version = 2 if strategy == "fsdp2" else 1
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
        model.config.save_pretrained(folder / "huggingface")
        torch.save({"_num_yielded": STEPS}, folder.parent / "data.pt")
        weights = dict(plain.named_parameters())
        moments = {f"{name}/{key}": of_plain.state[w][key] for name, w in weights.items() for key in of_plain.state[w]}
        whole = {"weights": {name: weight.detach() for name, weight in weights.items()}, "moments": moments}
        torch.save(whole, folder.parent.parent / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", choices=("fsdp", "fsdp2"), default="fsdp")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    save_public_checkpoint(arguments.model, arguments.folder, arguments.strategy, arguments.ranks)


if __name__ == "__main__":
    main()
