"""A training state in Ray's object store: it outlives the workers, and new ones go on from it."""

import pytest
import ray

from tests.models import tiny_model_dir
from tests.workers.support import ragged_batch
from verl.errors import WorkerError
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.trainer.config import SFTConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker


def start(path):
    config = SFTConfig(
        model=HFModelConfig(path=path),
        engine=FSDPEngineConfig(dtype="fp32"),
        optim=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=2),
    )
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(TrainingWorker, config=config, device_name="cpu"))
    group.init_model()
    return group


def test_new_workers_go_on_from_the_state_of_dead_ones(tmp_path, ray_cluster):
    path = tiny_model_dir(tmp_path, "qwen3")
    batch = ragged_batch()
    group = start(path)
    steps = [group.train_batch(batch).meta_info["metrics"]]
    held = group.execute_all_async("snapshot", 1)
    steps += [group.train_batch(batch).meta_info["metrics"] for _ in range(2)]
    rank_0 = ray.get(held[0])
    weights = rank_0["model_world_size_2_rank_0.pt"]["tensors"]
    assert not next(iter(weights.values())).bits.flags.writeable  # in shared memory, not in a message
    group.shutdown()
    again = start(path)
    again.restore(held)
    redone = [again.train_batch(batch).meta_info["metrics"] for _ in range(2)]
    for before, after in zip(steps[1:], redone, strict=True):
        assert (before["loss"], before["grad_norm"], before["lr"]) == (after["loss"], after["grad_norm"], after["lr"])
    with pytest.raises(WorkerError, match="rank 0 of 2 cannot take the state"):
        again.restore(held[::-1])
    again.shutdown()
