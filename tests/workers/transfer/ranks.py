"""Ranks that hold some tensors as weights: trainers send them, samplers receive them; and transports that break."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.config.rollout import CheckpointEngineConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.engine_side.verl_engine import checksum
from verl.workers.transfer import Broadcast, register_transfer
from verl.workers.transfer.plan import RankFacts, TransferPlan, TransferReport
from verl.workers.transfer.receiver import ReceivedWeights
from verl.workers.transfer.sender import WeightSender

CPU = torch.device("cpu")
SHAPES = {
    "embed": (700, 1000),  # 1.4 MB in bf16, larger than a part
    "odd": (3, 7, 13),
    "scalar": (),
    "empty": (0, 5),
    "norm": (257,),
    **{f"layer.{i}": (120, 333) for i in range(9)},  # 80 kB each
}


def weights_of(update: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights after an update: the first ones are random, and each update changes some elements, layer 0 all."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    for step in range(1, update):
        for name, tensor in weights.items():
            some = torch.rand(tensor.shape, generator=generator) < 0.01
            if name != "norm":
                tensor[some | (name == "layer.0")] += step
    weights["embed"][0, :2] = torch.tensor([-0.0, float("nan")])
    return weights


class Trainer(Worker):
    """A rank of the trainer; two ranks give the same weights."""

    def __init__(self, config: CheckpointEngineConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.sender, self.dtype = WeightSender(config, self.rank, CPU, dtype), dtype
        self.gathered = 0
        self.has_adapters = False

    def divide_weights(self, has_adapters: bool) -> None:
        """Send the weights as a base and, once more, as adapters."""
        self.has_adapters = has_adapters

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def transfer_facts(self) -> RankFacts:
        return RankFacts.from_this_process({})

    def serve_transfer_store(self, host: str) -> int:
        return self.sender.serve_store(host)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, plan: TransferPlan) -> TransferReport:
        self.gathered = 0
        names = ("base", "adapters") if self.has_adapters else ("merged",)
        return self.sender.send(plan, dict.fromkeys(names, partial(self._weights, plan.version)))

    def _weights(self, version: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights_of(version % 10, self.dtype).items():
            if version == 91 and self.rank == 0 and name == "layer.3":  # while others wait for the rest
                os.kill(os.getpid(), signal.SIGKILL)
            self.gathered += 1
            yield name, tensor.float()

    def gathered_weights(self) -> int:
        return self.gathered


class Sampler(Worker):
    """A rank of the rollout, without an engine."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        self.received = ReceivedWeights(config, self.rank, CPU)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def transfer_facts(self) -> RankFacts:
        return RankFacts.from_this_process(self.received.digests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, plan: TransferPlan, version: int) -> None:
        self.received.receive(plan, 5 if version == 6 else version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self, rank: int) -> None:
        if self.rank == rank:
            self.received.digests.clear()

    def checksums(self) -> tuple[int, dict[str, tuple[str, tuple[int, ...], int]]]:
        """Version, and of each weight format, shape and checksum of its bytes."""
        weights = self.received.weights
        assert not isinstance(weights, AdaptedWeights)
        return self.received.version, {name: described(tensor) for name, tensor in weights()}


@register_transfer("flips")
class Flips(Broadcast):
    """Changes one bit of the last byte that arrives."""

    def receive(self, message: Mapping[str, Any], memory: Tensor) -> None:
        super().receive(message, memory)
        memory[-1] ^= 1


@register_transfer("dies")
class Dies(Broadcast):
    """The receiver is killed when the second part is sent."""

    received = 0

    def receive(self, message: Mapping[str, Any], memory: Tensor) -> None:
        self.received += 1
        if self.received == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().receive(message, memory)


def described(tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    return str(tensor.dtype), tuple(tensor.shape), checksum(tensor)
