"""The worker that trains on given batches, by its public calls, in this process."""

import torch
from torch.testing import assert_close

from tests.workers.support import ragged_batch
from verl.config import PreferenceDataConfig, RMConfig, SFTConfig
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import RewardModelTrainingWorker, TrainingWorker


def start(worker, root, path, **sections):
    config = root(
        model=HFModelConfig(path=path),
        engine=FSDPEngineConfig(dtype="fp32"),
        optim=FSDPOptimizerConfig(lr=1e-2),
        **sections,
    )
    described = LocalWorkerGroup.describe(worker, config=config, device_name="cpu")
    group = LocalWorkerGroup(ray_cls_with_init=described)
    group.reset()
    return group


def test_reset_drops_what_was_trained(tmp_path):
    group = start(TrainingWorker, SFTConfig, tiny_model_dir(tmp_path, "qwen3"))
    batch = ragged_batch()
    before = group.infer_batch(data=batch).batch["log_probs"]
    first = group.train_batch(data=batch).meta_info["metrics"]
    after = group.infer_batch(data=batch).batch["log_probs"]
    mask = batch.batch["response_mask"].bool()
    assert before.shape == mask.shape
    assert after[mask].mean() > before[mask].mean()  # one step up the likelihood
    group.reset()
    assert torch.equal(group.infer_batch(data=batch).batch["log_probs"], before)
    assert group.train_batch(data=batch).meta_info["metrics"]["loss"] == first["loss"]
    # The loss is the mean of -log p over all tokens with response_mask 1.
    assert_close(torch.tensor(first["loss"]), -before[mask].mean(), rtol=1e-5, atol=1e-6)


def test_a_reward_model_infers_scores(tmp_path):
    path = tiny_model_dir(tmp_path, "qwen3", task="sequence_classification")
    group = start(RewardModelTrainingWorker, RMConfig, path, data=PreferenceDataConfig())
    batch = ragged_batch()
    found = group.infer_batch(batch)
    assert list(found.batch.keys()) == ["scores"]
    assert found.batch["scores"][batch.batch["response_mask"].bool()].abs().max() > 0
