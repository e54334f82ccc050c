"""The losses, on numbers small enough to work by hand."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from verl.algorithms import agg_loss, register_policy_loss
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.workers.config import ActorConfig, CriticConfig, DistillationConfig, PolicyLossConfig
from verl.workers.engine import BatchTotals, PartialSum
from verl.workers.losses import (
    DistillationLoss,
    OwnForwardLoss,
    PolicyLoss,
    RecordedLoss,
    TokenRecord,
    ValueLoss,
    sft_loss,
)

TOTALS = BatchTotals(dp_size=2, batch_num_tokens=6, global_batch_size=4)


def batch(**columns):
    return DataProto.from_dict(tensors={name: torch.as_tensor(value) for name, value in columns.items()})


POLICY_BATCH = {
    "response_mask": [[1, 1], [1, 0]],
    "advantages": [[1.0, 2.0], [-1.0, 9.0]],
    "old_log_probs": [[0.0, 0.0], [0.0, 0.0]],
    "ref_log_prob": [[0.5, 0.0], [0.0, 0.0]],
}


def test_policy_loss_by_hand():
    # ratios 1.1 (inside), 2 (clipped to 1.2 because A > 0), 0.5 (clipped to 0.8 because A < 0)
    log_probs = torch.log(tensor([[1.1, 2.0], [0.5, 7.0]]))
    entropy = tensor([[1.0, 2.0], [3.0, 100.0]])
    config = ActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="kl")
    loss, metrics = PolicyLoss(config)({"log_probs": log_probs, "entropy": entropy}, batch(**POLICY_BATCH), TOTALS)
    surrogate = (-1.1 - 2.4 + 0.8) / 6  # over the 6 tokens of the mini-batch, though only 3 are here
    bonus = 0.1 * (1 + 2 + 3) / 6
    kl = (math.log(1.1) - 0.5 + math.log(2) + math.log(0.5)) / 6
    expected = surrogate - bonus + 0.5 * kl
    assert_close(loss, tensor(2 * expected))  # times dp_size
    shares = {name: float(m.value) for name, m in metrics.items() if isinstance(m, PartialSum)}
    assert shares == {
        "actor/pg_loss": pytest.approx(surrogate),
        "actor/entropy_loss": pytest.approx(6 / 6),
        "actor/kl_loss": pytest.approx(kl),
        "actor/loss": pytest.approx(expected),
    }
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(2 / 3)
    assert metrics["actor/kl_coef"] == 0.5


def test_entropy_is_computed_only_if_asked_for():
    assert PolicyLoss(ActorConfig()).outputs == {"log_probs"}
    assert PolicyLoss(ActorConfig(entropy_coeff=0.1)).outputs == {"log_probs", "entropy"}
    assert PolicyLoss(ActorConfig(calculate_entropy=True)).outputs == {"log_probs", "entropy"}


def test_a_batch_without_old_log_probs_is_compared_with_itself():
    """Two micro-batches with their rows out of order, and a filler that repeats row 0 without its tokens."""
    columns = {"response_mask": tensor([[1, 1], [1, 0], [1, 1]]), "advantages": tensor([[1.0, 2.0], [-1.0, 9], [3, 4]])}
    plain = PolicyLoss(ActorConfig())
    record = TokenRecord(3)
    scoring = OwnForwardLoss(plain, record)
    assert (plain.outputs, scoring.outputs) == ({"log_probs"}, {"log_probs", "entropy"})
    whole = record.numbered(batch(**columns))
    log_probs = tensor([[-1.0, -2.0], [-0.5, 0.0], [-0.25, -3.0]], requires_grad=True)
    entropy = tensor([[1.0, 2.0], [3.0, 0.0], [0.5, 0.75]], requires_grad=True)
    for rows in ([2, 0], [1]):
        outputs = {"log_probs": log_probs[rows], "entropy": entropy[rows]}
        loss, metrics = scoring(outputs, whole.select_idxs(rows), TOTALS)
        loss.backward()
        assert float(metrics["actor/ppo_kl"]) == 0.0
        assert "actor/entropy_loss" not in metrics  # nobody asked the loss for it
    filler = whole.select_idxs([0])
    filler.batch["response_mask"] = torch.zeros(1, 2)
    scoring({"log_probs": torch.zeros(1, 2), "entropy": torch.zeros(1, 2)}, filler, TOTALS)
    # d/d log π of -A·r at r = 1 is -A, times dp_size over the 6 tokens of the mini-batch
    assert_close(log_probs.grad, tensor([[-1.0, -2.0], [1.0, 0.0], [-3.0, -4.0]]) * 2 / 6)
    assert entropy.grad is None
    found = record.columns(response_length=2, missing=0.0).batch
    assert_close(found["old_log_probs"], log_probs.detach())
    assert_close(found["entropys"], entropy.detach())


@pytest.mark.parametrize("mode", ["token-mean", "prompt-mean"])
def test_a_loss_of_users_finds_the_totals_in_a_copy_of_the_configuration(mode):
    seen = []

    @register_policy_loss("mine")
    def mine(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
        rollout_is_weights=None,
    ):  # fmt: skip
        seen.append(config)
        assert rollout_is_weights is None
        loss = agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info)
        return loss, {"actor/mine": 3.0}

    name = PolicyLossConfig(loss_mode="mine")
    config = ActorConfig(policy_loss=name, loss_agg_mode=mode, loss_scale_factor=7.0)
    log_probs = torch.full((2, 2), -2.0)
    loss, metrics = PolicyLoss(config)({"log_probs": log_probs}, batch(**POLICY_BATCH, row_weights=[0.25, 0.5]), TOTALS)
    expected, _ = PolicyLoss(
        ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"), loss_agg_mode=mode, loss_scale_factor=7.0)
    )({"log_probs": log_probs}, batch(**POLICY_BATCH, row_weights=[0.25, 0.5]), TOTALS)
    assert isinstance(seen[0], ActorConfig)
    totals = {name: value for name, value in seen[0].global_batch_info.items() if name != "row_weights"}
    assert totals == {"dp_size": 2, "batch_num_tokens": 6, "global_batch_size": 4, "loss_scale_factor": 7.0}
    assert ("row_weights" in seen[0].global_batch_info) == (mode == "prompt-mean")
    assert config.global_batch_info == {}
    assert_close(loss, expected)
    assert metrics["actor/mine"] == 3.0


def test_missing_columns_and_losses_are_named():
    columns = {name: value for name, value in POLICY_BATCH.items() if name != "ref_log_prob"}
    with pytest.raises(SchemaError, match=r"the KL loss .* needs column 'ref_log_prob'"):
        PolicyLoss(ActorConfig(use_kl_loss=True))({"log_probs": torch.zeros(2, 2)}, batch(**columns), TOTALS)
    with pytest.raises(ConfigError, match="vanilla"):
        PolicyLoss(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="vanila")))


def test_importance_weights_reach_the_loss():
    columns = POLICY_BATCH | {"rollout_is_weights": [[2.0, 0.0], [0.0, 0.0]]}
    loss, _ = PolicyLoss(ActorConfig())({"log_probs": torch.zeros(2, 2)}, batch(**columns), TOTALS)
    assert_close(loss, tensor(2 * -2.0 / 6))


def test_tokens_of_low_entropy_lose_their_policy_loss_and_nothing_else():
    columns = POLICY_BATCH | {"top_entropy_mask": [[1, 0], [1, 0]]}
    config = ActorConfig(
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type="kl",
        policy_loss=PolicyLossConfig(top_entropy_quantile=0.5),
    )
    entropy = tensor([[1.0, 2.0], [3.0, 100.0]])
    loss, _ = PolicyLoss(config)({"log_probs": torch.zeros(2, 2), "entropy": entropy}, batch(**columns), TOTALS)
    # policy: -1 + 1 of the kept tokens over all 6; entropy 1 + 2 + 3; KL 0 - 0.5
    assert_close(loss, tensor(2 * ((-1 + 1) / 6 - 0.1 * 6 / 6 + 0.5 * -0.5 / 6)))
    weighted = batch(**columns, rollout_is_weights=[[3.0, 7.0], [2.0, math.nan]])
    _, metrics = PolicyLoss(config)({"log_probs": torch.zeros(2, 2), "entropy": entropy}, weighted, TOTALS)
    assert float(metrics["actor/pg_loss"].value) == pytest.approx((-3 + 2) / 6)


def distillation(**settings) -> DistillationConfig:
    return DistillationConfig(enabled=True, distillation_loss=settings)


TAUGHT = POLICY_BATCH | {"teacher_logprobs": [[-1.0, -2.0], [-0.5, 0.0]]}


def test_a_divergence_beside_the_policy_loss_by_hand():
    # With old = 0 the ratios are 1, so the policy loss is -A and its gradient too. k2 = (log p - log q)² / 2.
    log_probs = tensor([[0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    loss_fn = DistillationLoss.from_config(ActorConfig(), distillation(loss_mode="k2", distillation_loss_coef=0.5))
    loss, metrics = loss_fn({"log_probs": log_probs}, batch(**TAUGHT), TOTALS)
    surrogate, k2 = (-1 - 2 + 1) / 6, (0.5 + 2 + 0.125) / 6
    assert_close(loss, tensor(2 * (surrogate + 0.5 * k2)))
    shares = {name: float(m.value) for name, m in metrics.items() if isinstance(m, PartialSum)}
    expected = {"actor/pg_loss": surrogate, "distillation/loss": k2, "actor/loss": surrogate + 0.5 * k2}
    assert shares == {name: pytest.approx(value) for name, value in expected.items()}
    loss.backward()
    assert_close(log_probs.grad, tensor([[-1 + 0.5 * 1.0, -2 + 0.5 * 2.0], [1 + 0.5 * 0.5, 0.0]]) * 2 / 6)


def test_divergences_as_advantages_by_hand():
    # Advantages log q - log p are -1, -2, -0.5; of ratio 2 nothing is clipped, as A < 0; the rewards' do not count.
    log_probs = torch.log(tensor([[1.0, 2.0], [1.0, 1.0]])).requires_grad_()
    settings = {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False}
    loss_fn = DistillationLoss.from_config(ActorConfig(), distillation(**settings))
    loss, metrics = loss_fn({"log_probs": log_probs}, batch(**TAUGHT), TOTALS)
    assert_close(loss, tensor(2 * (1 + 2 * 2 + 0.5) / 6))
    assert "actor/pg_loss" not in metrics
    assert float(metrics["distillation/pg_clipfrac"]) == 0
    loss.backward()
    assert_close(log_probs.grad, tensor([[1.0, 4.0], [0.5, 0.0]]) * 2 / 6)
    # Rows without context to learn from have no advantage, and the others keep their denominator.
    masked = batch(**TAUGHT, distillation_mask=[[0, 0], [1, 0]])
    assert_close(loss_fn({"log_probs": log_probs}, masked, TOTALS)[0], tensor(2 * 0.5 / 6))
    # Neither has a token that was rejected afterwards, here the second of the first row.
    rejected = batch(**TAUGHT | {"response_mask": [[1, 0], [1, 0]]}, distillation_mask=[[1, 1], [0, 0]])
    assert_close(loss_fn({"log_probs": log_probs}, rejected, TOTALS)[0], tensor(2 * 1.0 / 6))


def test_metrics_are_means_over_the_tokens_that_have_a_divergence():
    # The rows are micro-batches of one mini-batch: of three tokens one has a divergence, in the second row. Its ratio
    # of 1/9 is clipped, since log q - log p is -0.5: so 1 of 1 tokens is, not 1 of 3.
    log_probs = torch.log(tensor([[1.0, 1.0], [1 / 9, 1.0]]))
    settings = {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": False}
    loss_fn = DistillationLoss.from_config(ActorConfig(), distillation(**settings))
    rows = batch(**TAUGHT, distillation_mask=[[0, 0], [1, 0]])
    totals = BatchTotals(dp_size=1, batch_num_tokens=3, global_batch_size=2, distilled_tokens=1)
    of_rows = [loss_fn({"log_probs": log_probs[[row]]}, rows.select_idxs([row]), totals)[1] for row in range(2)]
    clipped = [metrics["distillation/pg_clipfrac"] for metrics in of_rows]
    assert [float(one.value) for one in clipped if isinstance(one, PartialSum)] == [0.0, 1.0]
    # A mini-batch without such a token has none of them: the largest of no losses would be -inf.
    loss_fn = DistillationLoss.from_config(ActorConfig(), distillation(loss_mode="k2"))
    none = batch(**TAUGHT, distillation_mask=[[0, 0], [0, 0]])
    assert "distillation/loss_max" not in loss_fn({"log_probs": log_probs}, none, TOTALS)[1]


def test_tokens_are_clipped_only_where_rewards_count():
    log_probs = torch.log(tensor([[9.0, 1.0], [1.0, 1.0]]))  # a ratio of 9 with a positive advantage
    for uses_rewards in (True, False):
        loss = DistillationLoss.from_config(ActorConfig(), distillation(loss_mode="k2", use_task_rewards=uses_rewards))
        record = TokenRecord(2)
        columns = batch(**TAUGHT | {"advantages": [[1.0, 1.0], [1.0, 1.0]]}, row=[0, 1])
        RecordedLoss(loss, record)({"log_probs": log_probs}, columns, TOTALS)
        seen = record.columns(2, missing=0.0).batch
        assert ("update_clipped" in seen.keys()) == uses_rewards
        if uses_rewards:
            assert seen["update_clipped"].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_prompt_mean_by_hand():
    columns = batch(**POLICY_BATCH, row_weights=[0.25, 0.5])
    loss, metrics = PolicyLoss(ActorConfig(loss_agg_mode="prompt-mean", calculate_entropy=True))(
        {"log_probs": torch.zeros(2, 2), "entropy": torch.ones(2, 2)}, columns, TOTALS
    )
    assert_close(loss, tensor(2 * (0.25 * (-1 - 2) + 0.5 * 1)))
    assert float(metrics["actor/entropy_loss"].value) == pytest.approx(0.25 * 2 + 0.5)


def test_what_the_controller_must_prepare_is_asked_for():
    outputs = {"log_probs": torch.zeros(2, 2)}
    for config, column in [
        (ActorConfig(loss_agg_mode="prompt-mean"), "row_weights"),
        (ActorConfig(policy_loss=PolicyLossConfig(top_entropy_quantile=0.5)), "top_entropy_mask"),
        (ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov")), "cov_selected"),
    ]:
        with pytest.raises(SchemaError, match=f"policy update needs column '{column}'.*algorithms.prepare_update"):
            PolicyLoss(config)(outputs, batch(**POLICY_BATCH), TOTALS)


def test_another_entropy_coefficient_for_one_step():
    loss = PolicyLoss(ActorConfig(entropy_target=0.2, entropy_coeff=0.0))
    assert loss.outputs == {"log_probs", "entropy"}
    assert loss.with_entropy_coeff(None) is loss
    outputs = {"log_probs": torch.zeros(2, 2), "entropy": torch.ones(2, 2)}
    found, metrics = loss.with_entropy_coeff(0.3)(outputs, batch(**POLICY_BATCH), TOTALS)
    assert_close(found, tensor(2 * ((-1 - 2 + 1) / 6 - 0.3 * 3 / 6)))
    assert metrics["actor/entropy_coeff"] == 0.3
    assert loss.config.entropy_coeff == 0.0


def test_a_loss_of_users_reads_the_entropy_coefficient_in_force():
    seen = []

    @register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
        seen.append(config.entropy_coeff)
        return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info), {}

    loss = PolicyLoss(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="mine"), entropy_coeff=0.1))
    outputs = {"log_probs": torch.zeros(2, 2), "entropy": torch.ones(2, 2)}
    loss(outputs, batch(**POLICY_BATCH), TOTALS)
    loss.with_entropy_coeff(0.3)(outputs, batch(**POLICY_BATCH), TOTALS)
    assert seen == [0.1, 0.3]


def test_value_loss_by_hand():
    columns = batch(response_mask=[[1, 1, 0]], values=[[0.0, 0.0, 0.0]], returns=[[1.0, 2.0, 50.0]])
    loss, metrics = ValueLoss(CriticConfig(cliprange_value=0.5))({"values": tensor([[0.2, 1.0, 3.0]])}, columns, TOTALS)
    # ½·(0.2-1)² and ½·max((1-2)², (0.5-2)²) over 6 tokens
    expected = 0.5 * (0.64 + 2.25) / 6
    assert_close(loss, tensor(2 * expected))
    assert float(metrics["critic/vf_loss"].value) == pytest.approx(expected)
    assert float(metrics["critic/vf_clipfrac"]) == 0.5
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(0.6)


def test_value_loss_in_prompt_mean():
    config = CriticConfig(cliprange_value=9.0, loss_agg_mode="prompt-mean")
    columns = {"response_mask": [[1, 1, 0]], "values": [[0.0, 0.0, 0.0]], "returns": [[1.0, 2.0, 50.0]]}
    loss, _ = ValueLoss(config)({"values": torch.zeros(1, 3)}, batch(**columns, row_weights=[0.25]), TOTALS)
    assert_close(loss, tensor(2 * 0.25 * 0.5 * (1.0 + 4.0)))
    with pytest.raises(SchemaError, match="the critic's update needs column 'row_weights'"):
        ValueLoss(config)({"values": torch.zeros(1, 3)}, batch(**columns), TOTALS)


def test_sft_loss_by_hand():
    columns = batch(response_mask=[[1, 0, 1]])
    loss, metrics = sft_loss({"log_probs": tensor([[-1.0, -9.0, -2.0]])}, columns, TOTALS)
    assert_close(loss, tensor(2 * 3.0 / 6))
    assert float(metrics["loss"].value) == pytest.approx(0.5)
