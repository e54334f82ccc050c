"""A user's own worker: an FSDP2 model on two ranks, its checkpoints, and times of both ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import LambdaLR

from tests.workers.support import run_ranks
from verl.compat.toolkit import fsdp
from verl.compat.toolkit.checkpoints import FSDPCheckpointManager
from verl.compat.toolkit.memory import enable_activation_offloading
from verl.compat.toolkit.timing import gather_timing, reduce_timing, topk_reduce_ratio_min_max
from verl.errors import CheckpointError, ConfigError
from verl.testing.models import tiny_model, tiny_tokenizer


def worker(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = tiny_model()
    with fsdp.get_init_weight_context_manager(mesh=mesh)():
        model = tiny_model(seed=rank)
    assert all(parameter.is_meta == (rank > 0) for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    layers = [type(module).__name__ for module in model.modules() if "DecoderLayer" in type(module).__name__]
    policy = fsdp.get_fsdp_wrap_policy(model)
    chosen = [m for m in model.modules() if policy and policy(module=m, recurse=False, nonwrapped_numel=0)]
    assert [type(module).__name__ for module in chosen] == layers

    weights = model.state_dict() if rank == 0 else {}
    placement = fsdp.get_shard_placement_fn(world_size)
    kwargs = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(), "shard_placement_fn": placement}
    fsdp.apply_fsdp2(model, kwargs, {"wrap_policy": {}})
    fsdp.fsdp2_load_full_state_dict(model, weights, mesh, None)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert [fsdp.fsdp_version(one) for one in (model, model.model.layers[0], whole)] == [2, 2, 0]

    ids = torch.arange(4, 12)[None]
    torch.testing.assert_close(model(ids).logits, whole(ids).logits)
    enable_activation_offloading(model)
    for one in (model, whole):
        one(input_ids=ids, labels=ids).loss.backward()
    norm = fsdp.fsdp2_clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
    assert norm > 0.5  # so something was clipped
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, whole)]
    for optimizer in optimizers:
        optimizer.step()
    fsdp.offload_fsdp_model_to_cpu(model)
    fsdp.load_fsdp_model_to_gpu(model)
    fsdp.offload_fsdp_optimizer(optimizers[0])
    fsdp.load_fsdp_optimizer(optimizers[0], "cpu")
    everywhere = fsdp.get_fsdp_full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(everywhere, dict(whole.state_dict()), rtol=1e-4, atol=1e-4)
    assert len(fsdp.get_fsdp_full_state_dict(model)) == (len(everywhere) if rank == 0 else 0)

    checkpoints(rank, folder, model, optimizers[0])
    times(rank)


def checkpoints(rank: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    manager = FSDPCheckpointManager(model, optimizer, schedule, tiny_tokenizer(), config)
    paths = [str(folder / f"global_step_{step}") for step in (1, 2)]
    schedule.step()
    manager.save_checkpoint(paths[0], global_step=1, max_ckpt_to_keep=1)
    saved = fsdp.get_fsdp_full_state_dict(model, rank0_only=False)
    drawn = torch.rand(3)
    model(input_ids=torch.arange(4, 12)[None], labels=torch.arange(4, 12)[None]).loss.backward()
    optimizer.step()
    schedule.step()
    assert not torch.equal(
        fsdp.get_fsdp_full_state_dict(model, rank0_only=False)["lm_head.weight"], saved["lm_head.weight"]
    )

    manager.load_checkpoint(paths[0])
    found = fsdp.get_fsdp_full_state_dict(model, rank0_only=False)
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert schedule.get_last_lr() == [0.005]
    assert torch.equal(torch.rand(3), drawn)
    dist.barrier()
    manager.save_checkpoint(paths[1], global_step=2, max_ckpt_to_keep=1)
    assert sorted(path.name for path in folder.glob("global_step_*")) == ["global_step_2"]
    if rank == 0:
        loaded = type(model).from_pretrained(f"{paths[1]}/huggingface")
        torch.testing.assert_close(dict(loaded.state_dict()), saved)
        (folder / "global_step_2" / "model_world_size_2_rank_1.pt").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"model_world_size_2_rank_1\.pt is missing"):
        manager.load_checkpoint(paths[1])
    dist.barrier()
    shutil.rmtree(paths[1], ignore_errors=True)


def times(rank: int) -> None:
    mine = {"gen": 1.0 + rank, "update": 3.0}
    assert gather_timing(mine) == {"gen": [1.0, 2.0], "update": [3.0, 3.0]}
    assert reduce_timing(mine) == {"gen": 1.5, "update": 3.0}
    assert reduce_timing(mine, dist.ReduceOp.MAX) == {"gen": 2.0, "update": 3.0}
    assert topk_reduce_ratio_min_max(100.0 - rank, k=10) == (1.0, 99.0, 100.0)  # both within ten percent of 100
    assert topk_reduce_ratio_min_max(100.0 - 20 * rank, k=10) == (0.5, 80.0, 100.0)


def test_two_ranks_shard_train_save_and_restore_a_model(tmp_path):
    run_ranks(worker, 2, tmp_path)


def test_dimensions_that_divide_are_sharded():
    place = fsdp.get_shard_placement_fn(4)
    assert [place(nn.Parameter(torch.zeros(*shape))) for shape in ((8, 3), (3, 8), (3, 3))] == [
        Shard(0),
        Shard(1),
        Shard(0),
    ]


def test_what_there_is_no_way_for_is_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="needs no separate units for adapters"):
        fsdp.get_fsdp_wrap_policy(model, is_lora=True)
    with pytest.raises(ConfigError, match="the model has no such layer"):
        fsdp.get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["GPT2Block"]})
    with pytest.raises(ConfigError, match="a checkpoint has no 'weights'"):
        FSDPCheckpointManager(model, checkpoint_config={"load_contents": ["weights"]})
