"""Where the tensors of a training state lie if the weights are on an accelerator: one that is emulated by PyTorch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from verl.checkpoint.shards import TrainingState


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def _devices_after(capturable: bool) -> dict[str, set[str] | str]:
    """Save and restore the state of one weight; an operation between two devices raises, as on a GPU."""
    _setup_privateuseone_for_python_backend("emulated")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.zeros(4, 3, device="emulated"))
        optimizer = AdamW([weight], capturable=capturable, foreach=False)
        weight.grad = torch.ones_like(weight)
        if capturable:
            optimizer.step()
        else:  # the step itself would ask for a number, which an emulated tensor does not have
            moments = {"exp_avg": torch.ones_like(weight), "exp_avg_sq": torch.ones_like(weight)}
            optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
        training = TrainingState({"w": weight}, {"w": weight}, optimizer, None)
        states = training.states(("model", "optimizer"), {}, copied=True)
        training.restore(states)
        restored = {key: value.device.type for key, value in optimizer.state[weight].items()}
        if capturable:
            optimizer.step()
    return {"saved": {tensor.device.type for tensor in _tensors(states)}, **restored}


@pytest.mark.parametrize(("capturable", "device_of_step"), [(True, "emulated"), (False, "cpu")])
def test_a_state_is_saved_on_the_cpu_and_restored_where_the_optimizer_reads_it(capturable, device_of_step):
    # A process of its own, because PyTorch keeps an emulated device to the end of the process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        devices = process.submit(_devices_after, capturable).result()
    assert devices == {"saved": {"cpu"}, "step": device_of_step, "exp_avg": "emulated", "exp_avg_sq": "emulated"}
