"""Training states of two ranks in Ray's object store and on disk: they outlive the workers, and new ones go on."""

import time

import pytest
import ray
from transformers import AutoModelForCausalLM

from tests.workers.support import ragged_batch
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.states import RunState
from verl.errors import CheckpointError, WorkerError
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.trainer.config import SFTConfig
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.training_workers import TrainingWorker


@pytest.fixture
def pool(ray_cluster):
    places = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    yield places
    places.release()


def start(path, pool):
    config = SFTConfig(
        model=HFModelConfig(path=path),
        engine=FSDPEngineConfig(dtype="fp32"),
        optim=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=2),
        checkpoint=CheckpointConfig(async_save=True, save_contents=("model", "optimizer", "extra", "hf_model")),
    )
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(TrainingWorker, config=config, device_name="cpu"))
    group.init_model()
    return group


def numbers(group, batch):
    found = group.train_batch(batch).meta_info["metrics"]
    return found["loss"], found["grad_norm"], found["lr"]


def test_new_workers_go_on_from_the_state_of_dead_ones(tmp_path, pool):
    path = tiny_model_dir(tmp_path / "model", "qwen3")
    batch = ragged_batch()
    plan = CheckpointPlan(root=str(tmp_path / "checkpoints"))
    group = start(path, pool)
    group.train_batch(batch)
    held = group.execute_all_async("snapshot", 1)
    checkpoint = TrainerCheckpoint(plan, {".": group})
    checkpoint.save(RunState(global_step=1, dataloader={}, controllers={}, rng={}))
    expected = [numbers(group, batch) for _ in range(2)]  # while it is written
    while not (tmp_path / "checkpoints" / "global_step_1").exists():
        checkpoint.poll()
        assert not checkpoint.owed
        time.sleep(0.01)
    weights = ray.get(held[0])["model_world_size_2_rank_0.pt"]["tensors"]
    assert not next(iter(weights.values())).bits.flags.writeable  # in shared memory, not in a message
    group.shutdown()

    again = start(path, pool)
    again.restore(held)
    assert [numbers(again, batch) for _ in range(2)] == expected
    with pytest.raises(WorkerError, match="rank 0 of 2 cannot load the state"):
        again.restore(held[::-1])
    assert TrainerCheckpoint(plan, {".": again}).load().global_step == 1
    assert [numbers(again, batch) for _ in range(2)] == expected
    step = tmp_path / "checkpoints" / "global_step_1"
    AutoModelForCausalLM.from_pretrained(step / "huggingface")
    shard = step / "optim_world_size_2_rank_1.pt"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"optim_world_size_2_rank_1.pt does not hold what was written"):
        TrainerCheckpoint(plan, {".": again}).load()
    again.shutdown()
