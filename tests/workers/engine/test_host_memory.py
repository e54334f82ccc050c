"""Weights and optimizer states that wait in the host's memory, and the size of both in a snapshot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.workers.support import make_engine, ragged_batch
from verl.testing.models import tiny_model_dir
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.fsdp.host_memory import HostMemory
from verl.workers.losses import sft_loss


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_states_go_to_the_same_memory_each_time_and_training_does_not_notice(tmp_path) -> None:
    """The engine is on a CPU: memory that it has not had stands for that of a device."""
    path = tiny_model_dir(tmp_path, tie_word_embeddings=True)
    # bf16 on one rank is FSDP, whose weights are DTensors.
    moving, still = (make_engine(path, model_dtype="fp32", dtype="bf16") for _ in range(2))
    host, places = HostMemory(is_pinned=False), []
    for _ in range(3):
        for engine in (moving, still):
            with engine.train_mode():
                engine.train_batch(ragged_batch(), sft_loss, MicroBatchConfig())
        before = [id(parameter) for parameter in moving.model.parameters()]
        host.move_model(moving.model)
        host.move_states(moving.optimizer)
        assert [id(parameter) for parameter in moving.model.parameters()] == before  # those that the optimizer has
        moments = [value for state in moving.optimizer.state.values() for value in state.values() if value.dim()]
        assert len(moments) == 2 * len(before)
        places.append([local(tensor).data_ptr() for tensor in (*moving.model.parameters(), *moments)])
        host.move_model(moving.model)  # what is there stays
        assert [local(parameter).data_ptr() for parameter in moving.model.parameters()] == places[-1][: len(before)]
        moving.model._apply(torch.clone)
        for state in moving.optimizer.state.values():
            state |= {key: value.clone() for key, value in state.items()}
    assert places[0] == places[1] == places[2]
    for (name, moved), (_, kept) in zip(moving.get_per_tensor_param(), still.get_per_tensor_param(), strict=True):
        assert torch.equal(moved, kept), name
    saved = moving.state(contents=["model", "optimizer"]).states.values()
    assert moving.state_bytes() == sum(tensor.nbytes for state in saved for tensor in state["tensors"].values())
