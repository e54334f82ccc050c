"""Bytes and seconds of a transfer of weights to rollout ranks of other processes, against a memory copy of the weights.

    python -m benchmarks.weight_transfer [--receivers 2] [--rounds 5]

One rank of the trainer holds a model in fp32 and sends it in bfloat16. Between two transfers its weights change by a
real step of AdamW with random gradients. The receivers hold no engine: what an engine does with the weights is the
same whatever brought them. Each transfer is measured on the driver, from its call to its return, with the conversion,
packing, checksums on both sides, and the calls of Ray. The yardstick copies as many bytes as the weights have into
memory that is mapped already, once before each transfer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace

import ray
import torch

from benchmarks import shape
from benchmarks.shape import TINY, Work
from verl.config import ActorRolloutRefConfig
from verl.config.rollout import CheckpointEngineConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, RolloutConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.transfer import WeightTransfer
from verl.workers.transfer.plan import RankFacts, TransferPlan
from verl.workers.transfer.receiver import ReceivedWeights

LARGE = Work(hidden=1024, layers=8, heads=16, key_value_heads=8, intermediate=3072)
MIB = 2**20


class Trainer(ActorRolloutRefWorker):
    """Trains by random gradients."""

    def random_step(self) -> None:
        """Run the optimizer once."""
        engine = self.trained
        with engine.train_mode():
            for parameter in engine.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn_like(parameter)
            engine.optimizer_step()
            engine.optimizer_zero_grad()


class Receiver(Worker):
    """Receives and verifies weights."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        self.received = ReceivedWeights(config, self.rank, torch.device("cpu"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def transfer_facts(self) -> RankFacts:
        """See :meth:`ActorRolloutRefWorker.transfer_facts`."""
        return RankFacts.from_this_process(self.received.digests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, plan: TransferPlan, version: int) -> None:
        """See :meth:`ActorRolloutRefWorker.receive_weights`."""
        self.received.receive(plan, version)


def config_of(path: str, backend: str, bucket_mib: int, lora_rank: int) -> ActorRolloutRefConfig:
    """The policy; its rollout engine takes adapters apart."""
    return ActorRolloutRefConfig(
        model=HFModelConfig(path=path, lora_rank=lora_rank, enable_gradient_checkpointing=False),
        actor=FSDPActorConfig(
            fsdp_config=FSDPEngineConfig(dtype="fp32"),
            ppo_mini_batch_size=1,
            ppo_micro_batch_size_per_gpu=1,
            optim=FSDPOptimizerConfig(lr=1e-6),
        ),
        rollout=RolloutConfig(
            name="vllm",
            dtype="bfloat16",
            tensor_model_parallel_size=1,
            merge_adapters=False,
            checkpoint_engine=CheckpointEngineConfig(backend=backend, update_weights_bucket_megabytes=bucket_mib),
        ),
    )


def measure(
    path: str, backend: str, receivers: int, rounds: int, bucket_mib: int = 2048, lora_rank: int = 0
) -> dict[str, float]:
    """Medians of transfers after the first: seconds, bytes, and seconds of a copy."""
    config = config_of(path, backend, bucket_mib, lora_rank)
    pools = [RayResourcePool([ranks], use_gpu=False) for ranks in (1, receivers)]
    trainer = RayWorkerGroup(pools[0], RayWorkerGroup.describe(Trainer, config, "actor", device_name="cpu"))
    described = RayWorkerGroup.describe(Receiver, config.rollout.checkpoint_engine)
    samplers = RayWorkerGroup(pools[1], described, device_name="cpu")
    trainer.init_model()
    transfer, found, copies = WeightTransfer.from_config(config), [], []
    first = transfer.update(trainer, samplers, 0)
    source = torch.ones(int(first["weight_transfer/bytes_of_weights"]), dtype=torch.uint8)
    target = torch.ones_like(source)
    for version in range(1, rounds + 1):
        trainer.execute_all_sync("random_step")
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
        found.append(transfer.update(trainer, samplers, version))
    for group, pool in zip((trainer, samplers), pools, strict=True):
        group.shutdown()
        pool.release()
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {
        **{name.rpartition("/")[2]: value for name, value in medians.items()},
        "bytes_of_weights": first["weight_transfer/bytes_of_weights"],
        "first_seconds": first["weight_transfer/seconds"],
        "copy_seconds": statistics.median(copies),
    }


CASES: Mapping[str, Mapping[str, object]] = {
    "shared memory": {"backend": "shared_memory"},
    "broadcast, one part": {"backend": "nccl"},
    "broadcast, parts of 32 MiB": {"backend": "nccl", "bucket_mib": 32},
    "adapters of rank 16": {"backend": "naive", "lora_rank": 16},
}


def main() -> None:
    """The command line."""
    parser: argparse.ArgumentParser = shape.parser(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--receivers", type=int, default=2, help="ranks that receive, all on this machine")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=arguments.receivers + 1, include_dashboard=False, log_to_driver=False)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = (replace(TINY, hidden=64) if arguments.tiny else LARGE).save_model(folder)
        for name, case in CASES.items():
            found = results[name] = measure(path, receivers=arguments.receivers, rounds=arguments.rounds, **case)  # type: ignore[arg-type]
            print(
                f"{name}: {found['bytes_sent'] / MIB:.2f} of {found['bytes_of_weights'] / MIB:.1f} MiB in "
                f"{found['seconds']:.3f} s, {found['seconds'] / found['copy_seconds']:.1f} copies (the first "
                f"{found['first_seconds'] / found['copy_seconds']:.1f})"
            )
    ray.shutdown()
    shape.write_result(
        arguments.json,
        part="weight_transfer",
        machine=shape.machine(),
        versions=shape.versions("torch", "transformers", "ray"),
        results=results,
    )


if __name__ == "__main__":
    main()
