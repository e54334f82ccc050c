"""Weights and optimizer states that wait in the host's memory, and the size of both in a snapshot."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.workers.support import make_engine, ragged_batch
from verl.testing.models import tiny_model_dir
from verl.utils.pinned_memory import HostPieces
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


def test_pinned_memory_is_what_is_asked_for() -> None:
    """PyTorch rounds a pinned allocation up to a power of two; here of an eighth of Qwen2.5-7B. No page is touched."""
    hidden, width = 3584, 18944
    layer = [hidden * hidden, hidden * hidden // 7, hidden * hidden // 7, *[hidden * width] * 3, hidden, hidden]
    sizes = [4 * count // 8 for count in (2 * [hidden * 152064] + 28 * layer) for _ in range(3)]
    pieces = HostPieces(is_pinned=False)
    taken = [pieces.take(size) for size in sizes]
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.9 * sum(sizes), "an allocation for each"
    assert pieces.allocated_bytes < 1.1 * sum(sizes)
    assert all(piece.untyped_storage().nbytes() == size for piece, size in zip(taken, sizes, strict=True))
    bounds = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bounds))
