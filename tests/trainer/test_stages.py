import numpy as np
import pytest
import torch

from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.trainer.ppo import stages
from verl.trainer.ppo.core_algos import FixedKLController


def batch(**tensors: torch.Tensor) -> DataProto:
    rows = len(next(iter(tensors.values())))
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "a", "b"][:rows], dtype=object)})


def test_failed_samples_lose_their_mask_and_their_group():
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    columns, metrics = stages.drop_failed_samples(batch(response_mask=mask), ["ok", "error", "ok"])
    assert columns.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
    uids = columns.non_tensor_batch["uid"].tolist()
    assert uids[0] == "a"
    assert uids[2] == "b"
    assert uids[1] not in ("a", "b")
    assert metrics["reward/error_rate"] == pytest.approx(1 / 3)


def test_an_error_is_no_part_of_the_baseline_of_its_group():
    # Scores 1 and 0 of a group, and a failed sample: with it as a zero the mean would be 1/3, without it is 1/2.
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(3, 1, dtype=torch.long),
            "token_level_rewards": torch.tensor([[1.0], [0.0], [0.0]]),
        },
        non_tensors={"uid": np.array(["a", "a", "a"], dtype=object)},
    )
    columns, _ = stages.drop_failed_samples(data, ["ok", "ok", "error"])
    kept = data.select(batch_keys=["token_level_rewards"], non_tensor_batch_keys=[]) | columns
    result = stages.compute_advantage(kept, "grpo", {"norm_adv_by_std_in_grpo": False})
    assert result.batch["advantages"].flatten().tolist() == [0.5, -0.5, 0.0]


def test_kl_penalty_by_hand():
    # kl = log p - log p_ref = [[0.5, 0.25]], second token masked; reward = score - 0.1 * kl on valid tokens.
    data = batch(
        token_level_scores=torch.tensor([[0.0, 1.0]]),
        old_log_probs=torch.tensor([[-1.0, -1.0]]),
        ref_log_prob=torch.tensor([[-1.5, -1.25]]),
        response_mask=torch.tensor([[1, 0]]),
    )
    # What lies behind the mask is no reward: 0 there.
    penalised, metrics = stages.apply_kl_penalty(data, FixedKLController(0.1), "kl")
    assert penalised.batch["token_level_rewards"].tolist() == [[pytest.approx(-0.05), 0.0]]
    assert metrics == {"actor/reward_kl_penalty": 0.5, "actor/reward_kl_penalty_coeff": 0.1}


def test_siblings_are_neighbours_and_counted():
    prompts = DataProto.from_dict(tensors={"input_ids": torch.tensor([[1], [2]])})
    repeated = stages.repeat_prompts(stages.name_groups(prompts, step=7), 2)
    assert repeated.batch["input_ids"].flatten().tolist() == [1, 1, 2, 2]
    assert repeated.non_tensor_batch["uid"].tolist() == ["7-0", "7-0", "7-1", "7-1"]
    assert repeated.non_tensor_batch["sample_index"].tolist() == [0, 1, 0, 1]


def test_a_gap_between_rollout_and_trainer_can_stop_the_run():
    stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.3}, None)
    stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.1}, 0.2)
    with pytest.raises(RolloutError, match=r"differs by 0.3 .*max_rollout_actor_probs_diff=0.2"):
        stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.3}, 0.2)
