"""Two ranks that train with FSDP and two of one native engine: the engine computes with the bits that were trained."""

from __future__ import annotations

import pytest
import torch

from tests.workers.groups import prompts
from tests.workers.support import P, R
from verl.config import ActorRolloutRefConfig
from verl.config.rollout import CheckpointEngineConfig
from verl.testing.models import tiny_model_dir
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import FSDPEngine
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.engine_side.verl_engine import checksum
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.transfer import WeightTransfer


class Policy(ActorRolloutRefWorker):
    """Tells the bits of its weights."""

    def change(self, step: int) -> None:
        assert isinstance(self.engine, FSDPEngine)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                parameter.mul_(1 + step / 256)

    def checksums(self) -> dict[str, int]:
        if self.engine is not None:
            weights = self.engine.weights_for_rollout(torch.bfloat16)
            return {name: checksum(tensor.bfloat16()) for name, tensor in weights}
        assert isinstance(self.rollout, NativeRollout)
        return {name: checksum(tensor) for name, tensor in self.rollout._model.module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_the_engine_has_the_trained_bits(ray_cluster, tmp_path, backend):
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=tiny_model_dir(tmp_path, "qwen3", tie_word_embeddings=True)),
        actor=FSDPActorConfig(
            fsdp_config=FSDPEngineConfig(dtype="fp32"),
            ppo_mini_batch_size=2,
            ppo_micro_batch_size_per_gpu=1,
            optim=FSDPOptimizerConfig(lr=1e-2),
        ),
        rollout=RolloutConfig(
            tensor_model_parallel_size=1,
            prompt_length=P,
            response_length=R,
            dtype="bfloat16",
            free_cache_engine=False,
            checkpoint_engine=CheckpointEngineConfig(backend=backend),
        ),
    )
    pools = [RayResourcePool([2], use_gpu=False) for _ in range(2)]
    trainers, samplers = (
        RayWorkerGroup(pool, RayWorkerGroup.describe(Policy, config, role, device_name="cpu"))
        for pool, role in zip(pools, ("actor", "rollout"), strict=True)
    )
    trainers.init_model()
    samplers.init_model()
    transfer = WeightTransfer.from_config(config)
    seen = []
    for version in (1, 2, 3):
        trainers.execute_all_sync("change", version)
        transfer.update(trainers, samplers, version)
        responses = samplers.generate_sequences(prompts())
        assert responses.non_tensor_batch["weight_version"].tolist() == [version] * len(responses)
        trained, sampled = trainers.execute_all_sync("checksums"), samplers.execute_all_sync("checksums")
        assert sampled == trained
        seen.append(trained[0])
    assert not seen[0].items() & seen[2].items()
    for group, pool in zip((trainers, samplers), pools, strict=True):
        group.shutdown()
        pool.release()
