"""What the driver hands to an update beside the batch: prepared columns, the entropy coefficient of the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.workers.support import ragged_batch
from verl.algorithms import get_entropy_controller, prepare_update
from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.workers.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker

ROWS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def policy(path: str, **changes: Any) -> LocalWorkerGroup:
    actor = FSDPActorConfig(
        fsdp_config=FSDPEngineConfig(dtype="fp32"),
        ppo_mini_batch_size=ROWS,
        optim=FSDPOptimizerConfig(lr=1e-3, weight_decay=0.0),
        **changes,
    )
    config = ActorRolloutRefConfig(model=HFModelConfig(path=path), actor=actor)
    group = LocalWorkerGroup(
        ray_cls_with_init=LocalWorkerGroup.describe(
            ActorRolloutRefWorker, device_name="cpu", config=config, role="actor"
        )
    )
    group.init_model()
    return group


def scored(group: LocalWorkerGroup) -> DataProto:
    batch = ragged_batch(ROWS)
    return batch | group.compute_log_prob(batch)


def weights(group: LocalWorkerGroup) -> torch.Tensor:
    return torch.cat([w.flatten() for _, w in group.workers[0].engine.get_per_tensor_param()])


def test_the_entropy_coefficient_of_the_step_reaches_the_loss(path: str):
    fixed, steered, plain = policy(path, entropy_coeff=0.5), policy(path, entropy_target=9.0), policy(path)
    batch = scored(plain)
    controller = get_entropy_controller(steered.workers[0].config.actor)
    controller.load_state_dict({"value": 0.5, "coeff": 0.5})
    expected = fixed.update_actor(batch).meta_info["metrics"]
    metrics = steered.update_actor(batch, entropy_coeff=controller.value).meta_info["metrics"]
    assert metrics["actor/entropy_coeff"] == expected["actor/entropy_coeff"] == 0.5
    plain.update_actor(batch)
    assert_close(weights(steered), weights(fixed))
    assert not torch.allclose(weights(steered), weights(plain))
    # the coefficient is that of the step, not kept
    assert steered.update_actor(batch).meta_info["metrics"]["actor/entropy_coeff"] == 0.0


def test_prepared_columns_travel_with_the_rows(path: str):
    group = policy(
        path,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="prompt-mean",
        policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.5, top_entropy_quantile=0.5),
    )
    batch, config = scored(group), group.workers[0].config.actor
    columns = {**dict(batch.batch.items()), "index": np.array(["a", "a", "b", "b"], dtype=object)}
    made = prepare_update(columns, config, seed=0)
    metrics = group.update_actor(batch | DataProto.from_dict(tensors=made)).meta_info["metrics"]
    tokens = int(batch.batch["response_mask"].sum())
    assert metrics["actor/cov_selected_frac"] == pytest.approx((tokens // 2) / tokens)
    with pytest.raises(SchemaError, match=r"needs columns 'cov_selected', 'row_weights', 'top_entropy_mask'"):
        group.update_actor(batch)


def test_each_mini_batch_selects_its_tokens_by_the_current_policy(path: str):
    settings = PolicyLossConfig(loss_mode="m2po", m2_threshold=1e-4)
    twice, single = policy(path, policy_loss=settings, ppo_epochs=2), policy(path, policy_loss=settings)
    batch = scored(twice)
    rollout = DataProto.from_dict(tensors={"rollout_log_probs": batch.batch["old_log_probs"]})
    batch = batch | rollout
    config = twice.workers[0].config.actor
    batch = batch | DataProto.from_dict(tensors=prepare_update(dict(batch.batch.items()), config, seed=0))
    assert single.update_actor(batch).meta_info["metrics"]["actor/pg_clipfrac"] == 0.0
    # What the policy after the first step takes out, in a loop: the largest squares until the mean is small enough.
    new, mask = single.compute_log_prob(batch).batch["old_log_probs"], batch.batch["response_mask"].bool()
    moved = (new - batch.batch["old_log_probs"]).double()[mask]
    left = sorted((d * d for d in moved[moved * batch.batch["advantages"][mask] > 0].tolist()), reverse=True)
    outward = len(left)
    while left and sum(left) / len(left) > 1e-4:
        left.pop(0)
    assert len(left) < outward
    fraction = (outward - len(left)) / int(mask.sum())
    metrics = twice.update_actor(batch).meta_info["metrics"]
    assert metrics["actor/pg_clipfrac"] == pytest.approx(fraction / 2)  # the mean of two optimizer steps
