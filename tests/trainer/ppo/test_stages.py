import numpy as np
import pytest
import torch

from verl.algorithms import FixedKLController
from verl.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.trainer.ppo import stages
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_rollout_gap_metrics
from verl.workers.reward_manager.scores import on_drawn_tokens


def batch(**tensors: torch.Tensor) -> DataProto:
    rows = len(next(iter(tensors.values())))
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "a", "b"][:rows], dtype=object)})


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


def test_a_gap_between_rollout_and_trainer_can_stop_the_run():
    stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.3}, None)
    stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.1}, 0.2)
    with pytest.raises(RolloutError, match=r"differs by 0.3 .*max_rollout_actor_probs_diff=0.2"):
        stages.check_rollout_gap({"training/rollout_probs_diff_max": 0.3}, 0.2)
    with pytest.raises(RolloutError, match="differs by nan"):
        stages.check_rollout_gap({"training/rollout_probs_diff_max": float("nan")}, 0.2)


def test_a_column_of_the_data_does_not_stand_in_for_a_tensor():
    # A data set may have a column that is called as a stage calls its own; the estimator gets the stage's.
    columns = {"token_level_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.ones(1, 2)}
    named = {"uid": np.array(["a"], dtype=object), "token_level_rewards": np.array(["of the data"], dtype=object)}
    found = stages.compute_advantage(DataProto.from_dict(columns, named), "reinforce_plus_plus")
    assert found.batch["returns"].tolist() == [[1.0, 1.0]]


def driver_columns(batch: DataProto) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """All that the driver computes of scored trajectories between the calls of workers: columns, and metrics."""
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.2_5")
    actor = ActorConfig(
        strategy="fsdp",
        loss_agg_mode="prompt-mean",
        policy_loss=PolicyLossConfig(loss_mode="clip_cov", top_entropy_quantile=0.5, clip_cov_ratio=0.4),
    )
    corrected, metrics = stages.correct_rollout(batch, correction)
    batch = batch | corrected
    batch, of_kl = stages.apply_kl_penalty(batch, FixedKLController(0.1), "low_var_kl")
    batch = stages.compute_advantage(batch, "bi_level_gae", gamma=0.9, lam=0.8, config={"high_level_gamma": 0.5})
    metrics |= of_kl | compute_data_metrics(batch) | compute_rollout_gap_metrics(batch)
    metrics |= stages.mean_entropy(batch, "seq-mean-token-mean", None) | {"entropy": stages.entropy_per_token(batch)}
    chosen = stages.without_rejected(batch)
    prepared = stages.prepare_mini_batches(chosen, actor, [3], seed=3)
    names = ("token_level_rewards", "advantages", "returns", "rollout_is_weights", "accepted_mask")
    return {name: batch.batch[name] for name in names} | dict(prepared.batch.items()), metrics


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), 1e30])
def test_what_stands_at_tokens_of_others_changes_nothing(garbage: float):
    # Two turns with a tool between, one turn that a user answered, and a response that the template ends.
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0]])
    present = torch.tensor([[1] * 7, [1] * 6 + [0], [1] * 5 + [0] * 2])
    generator = torch.Generator().manual_seed(0)
    read = ["rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "entropys"]
    columns = {name: -torch.rand(3, 7, generator=generator) for name in read}
    scores = on_drawn_tokens(torch.rand(3, 7, generator=generator) * present, mask)
    same = {
        "responses": present, "attention_mask": torch.cat([torch.ones(3, 2).long(), present], -1),
        "response_mask": mask, "token_level_scores": scores,
    }  # fmt: skip
    clean, told = driver_columns(batch(**same, **columns))
    assert len(set(clean)) == 8
    dirty = {name: column.masked_fill(mask == 0, garbage) for name, column in columns.items()}
    found, told_of_dirty = driver_columns(batch(**same, **dirty))
    assert found.keys() == clean.keys()
    for name, column in clean.items():
        torch.testing.assert_close(found[name], column, rtol=0, atol=0, msg=name)
        assert torch.isfinite(column).all(), name
    assert told_of_dirty == pytest.approx(told, rel=0, abs=0, nan_ok=True)
