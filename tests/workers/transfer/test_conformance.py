"""Every way to transfer weights, between real processes: what arrives, and what happens when something breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tests.workers.transfer.ranks import SHAPES, Sampler, Trainer, described, weights_of
from verl.config import ActorRolloutRefConfig
from verl.config.model import HFModelConfig
from verl.config.rollout import CheckpointEngineConfig, RolloutConfig
from verl.errors import ProcessLostError, WorkerError
from verl.single_controller.base import WorkerGroup
from verl.workers.transfer import WeightTransfer

BACKENDS = ("naive", "nccl", "shared_memory")


def config_of(backend: str) -> CheckpointEngineConfig:
    module = "tests.workers.transfer.ranks"  # it registers transports that break
    return CheckpointEngineConfig(backend=backend, update_weights_bucket_megabytes=1, custom_backend_module=module)


def transfer_of(backend: str) -> WeightTransfer:
    rollout = RolloutConfig(checkpoint_engine=config_of(backend))
    return WeightTransfer.from_config(ActorRolloutRefConfig(model=HFModelConfig(path="none"), rollout=rollout))


class Groups(NamedTuple):
    trainers: WorkerGroup
    samplers: WorkerGroup
    dtype: torch.dtype

    def check(self, version: int) -> None:
        expected = {name: described(tensor) for name, tensor in weights_of(version % 10, self.dtype).items()}
        assert self.samplers.execute_all_sync("checksums") == [(version, expected)] * 2

    def shutdown(self) -> None:
        self.trainers.shutdown()
        self.samplers.shutdown()


@pytest.fixture(scope="module")
def places(ray_cluster):
    from verl.single_controller.ray import RayResourcePool, split_resource_pool

    pool = RayResourcePool([4], use_gpu=False, detached=True)
    yield split_resource_pool(pool, 2)
    pool.release()


def start(places, dtype: torch.dtype) -> Groups:
    from verl.single_controller.ray import RayWorkerGroup

    config = config_of("naive")
    trainers = RayWorkerGroup(places[0], RayWorkerGroup.describe(Trainer, config, dtype), device_name="cpu")
    samplers = RayWorkerGroup(places[1], RayWorkerGroup.describe(Sampler, config), device_name="cpu")
    return Groups(trainers, samplers, dtype)


@pytest.fixture(
    scope="module", params=[pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=["bf16", "fp32"]
)
def groups(request, places) -> Iterator[Groups]:
    groups = start(places, request.param)
    yield groups
    groups.shutdown()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_gets_every_bit(groups, backend):
    transfer = transfer_of(backend)
    size = groups.dtype.itemsize * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for version in (1, 2, 3):
        metrics = transfer.update(groups.trainers, groups.samplers, version)
        groups.check(version)
        assert metrics["weight_transfer/bytes_of_weights"] == size
        assert metrics["timing_s/param_sync"] == metrics["weight_transfer/seconds"] > 0
    assert groups.trainers.execute_all_sync("gathered_weights") == [len(SHAPES)] * 2


def test_another_version_is_refused(groups):
    transfer = transfer_of("nccl")
    with pytest.raises(WorkerError, match=r"expects (weights of )?version 5"):
        transfer.update(groups.trainers, groups.samplers, 6)
    assert groups.trainers.execute_all_sync("gathered_weights") == [len(SHAPES)] * 2
    with pytest.raises(WorkerError, match="version 5 ended early"):
        groups.samplers.execute_all_sync("checksums")
    transfer.update(groups.trainers, groups.samplers, 2)
    groups.check(2)


def test_what_arrives_otherwise_than_it_was_sent_is_refused(groups):
    with pytest.raises(WorkerError, match=r"1 of \d+ weights did not arrive .* as they were sent: embed"):
        transfer_of("flips").update(groups.trainers, groups.samplers, 1)
    transfer_of("nccl").update(groups.trainers, groups.samplers, 2)
    groups.check(2)


def test_a_base_is_sent_again_only_if_a_rank_does_not_hold_it(groups):
    transfer = transfer_of("nccl")
    groups.trainers.execute_all_sync("divide_weights", True)
    sizes = []
    for rank_that_forgets in (None, None, 1):  # one rank of two is enough
        if rank_that_forgets is not None:
            groups.samplers.forget(rank_that_forgets)
        metrics = transfer.update(groups.trainers, groups.samplers, 2)
        sizes.append(metrics["weight_transfer/bytes_sent"])
    groups.trainers.execute_all_sync("divide_weights", False)
    adapters = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())  # which stay in fp32
    base = adapters * groups.dtype.itemsize // 4
    assert sizes == pytest.approx([base + adapters, adapters, base + adapters], rel=1e-3)  # parts are aligned


@pytest.mark.slow
def test_after_the_loss_of_a_receiver_or_the_sender_the_others_go_on(places):
    from verl.single_controller.ray import RayWorkerGroup

    first = start(places, torch.bfloat16)
    with pytest.raises(ProcessLostError, match=r"rank 0 of 2 died in Sampler.receive_weights"):
        transfer_of("dies").update(first.trainers, first.samplers, 1)
    first.samplers.shutdown()
    described = RayWorkerGroup.describe(Sampler, config_of("nccl"))
    second = first._replace(samplers=RayWorkerGroup(places[1], described, device_name="cpu"))
    transfer = transfer_of("nccl")
    for version in (2, 3):
        transfer.update(second.trainers, second.samplers, version)
        second.check(version)
    with pytest.raises(ProcessLostError, match=r"rank 0 of 2 died in Trainer.send_weights"):
        transfer.update(second.trainers, second.samplers, 91)
    second.trainers.shutdown()
    described = RayWorkerGroup.describe(Trainer, config_of("nccl"), torch.bfloat16)
    third = second._replace(trainers=RayWorkerGroup(places[0], described, device_name="cpu"))
    transfer.update(third.trainers, third.samplers, 2)
    third.check(2)
    third.shutdown()
