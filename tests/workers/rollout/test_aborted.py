"""Responses that were aborted, some before their first token, on their way through the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algorithms import agg_loss
from verl.testing.rollout_conformance import prompt_batch
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.stages import compute_advantage
from verl.workers.reward_manager.scores import on_last_token
from verl.workers.rollout.base import RolloutOutput
from verl.workers.rollout.columns import columns_from_outputs


def batch_of(outputs, rewards):
    """Two responses to each of two prompts, scored."""
    prompts = prompt_batch([[10, 20], [10, 20], [7], [7]], width=3, indices=[0, 1, 0, 1])
    batch = prompts.select(batch_keys=[]) | columns_from_outputs(prompts, outputs, response_length=3, pad_token_id=0)
    scores = on_last_token(batch.batch["response_mask"], rewards)
    columns = {"token_level_scores": scores, "token_level_rewards": scores}
    return batch | type(batch).from_dict(tensors=columns)


OUTPUTS = [
    RolloutOutput([5, 1], [-0.5, -1.0], "stop", 4),
    RolloutOutput([], [], "abort", 4),
    RolloutOutput([6, 7, 8], [-2.0, -1.0, -3.0], "length", 4),
    RolloutOutput([9], [-0.25], "abort", 4),
]


def test_the_columns_of_a_response_without_tokens():
    batch = batch_of(OUTPUTS, [1.0, 1.0, 0.0, 0.0])
    assert batch.batch["responses"].tolist() == [[5, 1, 0], [0, 0, 0], [6, 7, 8], [9, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, -1, 0], [0, 0, 0], [-2, -1, -3], [-0.25, 0, 0]]
    assert batch.batch["attention_mask"][1].tolist() == [0, 1, 1, 0, 0, 0]
    assert batch.batch["position_ids"][1].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "abort", "length", "abort"]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_it_is_no_part_of_baselines_and_its_advantages_are_zero(estimator):
    batch = batch_of(OUTPUTS, [1.0, 1.0, 0.0, 0.0])
    made = compute_advantage(batch, estimator)
    others = batch.select_idxs([0, 2, 3])
    assert torch.isfinite(made.batch["advantages"]).all()
    assert made.batch["advantages"][1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(
        made.batch["advantages"][[0, 2, 3]], compute_advantage(others, estimator).batch["advantages"]
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_it_is_no_part_of_a_loss(mode):
    batch = batch_of(OUTPUTS, [1.0, 1.0, 0.0, 0.0])
    mask = batch.batch["response_mask"]
    values = torch.arange(12.0).view(4, 3)
    others = values.clone()
    others[1] = 1e9
    assert torch.equal(agg_loss(values, mask, mode), agg_loss(others, mask, mode))


def test_metrics_count_it_and_leave_its_score_out():
    batch = batch_of(OUTPUTS, [1.0, 1.0, 0.0, 0.5])
    batch = compute_advantage(batch, "grpo")
    metrics = compute_data_metrics(batch, use_critic=False)
    assert metrics["response/aborted_ratio"] == 0.25
    assert metrics["critic/score/mean"] == 0.5  # of 1, 0 and 0.5
    assert metrics["response_length/min"] == 0
    assert metrics["response_length_non_aborted/mean"] == 2.0  # of 2, 3 and 1 tokens
    assert all(not math.isnan(value) for value in metrics.values())


def test_a_batch_of_which_nothing_came_back():
    outputs = [RolloutOutput([], [], "abort", 4)] * 4
    batch = batch_of(outputs, [1.0] * 4)
    batch = compute_advantage(batch, "grpo")
    assert batch.batch["advantages"].abs().sum() == 0
    metrics = compute_data_metrics(batch, use_critic=False)
    assert metrics["response/aborted_ratio"] == 1.0
    assert not any(np.isnan(value) for name, value in metrics.items() if name.startswith("response_length/"))
