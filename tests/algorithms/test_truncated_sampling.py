"""Truncated sampling, by enumeration over a tiny vocabulary: which gradient its samples have, and what weights repair.

The policy is a table: logits of the first token, and of the second token after each first one. Responses are drawn
with top_p, top_k or min_p, so from a distribution μ that is not the policy π. Every response is weighed with its
probability under μ, so nothing here is random.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from verl.algorithms import compute_policy_loss_bypass_mode, compute_policy_loss_vanilla
from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.sampling import TokenSampler

VOCAB = 4
FIRST = tensor([1.0, 0.4, -0.3, -1.2])
SECOND = tensor([[0.2, 1.1, -0.8, 0.0], [1.5, -0.5, 0.3, 0.1], [-1.0, 0.6, 0.9, -0.2], [0.0, 0.1, 0.2, 2.0]])
REWARDS = tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, 2.0, 4.0, 0.0], [2.5, 1.5, -0.5, 1.0], [5.0, -4.0, 3.0, 2.0]])
WAYS = [{"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.4}, {"top_k": 3, "top_p": 0.8, "min_p": 0.1}]


def log_mu(logits: Tensor, draws: int = 400, **way: Any) -> dict[int, float]:
    """What the sampler can draw, and the log-probs that it returns."""
    params = [SamplingParams(max_tokens=1, seed=seed, **way) for seed in range(draws)]
    tokens, log_probs = TokenSampler(params, torch.device("cpu"))(logits.repeat(draws, 1), torch.arange(draws), 0)
    found = dict(zip(tokens.tolist(), log_probs.double().tolist(), strict=True))
    assert sum(math.exp(x) for x in found.values()) == pytest.approx(1.0)  # every token kept came up
    return found


class Case:
    """All responses of one or two tokens that μ can draw, as a batch whose log-probs depend on the table."""

    def __init__(self, length: int, **way: Any) -> None:
        self.first, self.second = FIRST.double().requires_grad_(), SECOND.double().requires_grad_()
        first = log_mu(FIRST, **way)
        if length == 1:
            self.responses = [(a,) for a in first]
            rollout = [[first[a]] for a in first]
        else:
            seconds = {a: log_mu(SECOND[a], **way) for a in first}
            self.responses = [(a, b) for a in first for b in seconds[a]]
            rollout = [[first[a], seconds[a][b]] for a, b in self.responses]
        self.rollout = tensor(rollout, dtype=torch.float64)
        self.mu = self.rollout.sum(-1).exp()  # (responses,)
        self.log_prob = self.log_probs(self.responses)
        # The mean reward as a baseline: any constant would do.
        rewards = tensor([self.reward(y) for y in self.responses], dtype=torch.float64)
        self.advantages = (rewards - 0.7).unsqueeze(-1).expand(self.rollout.shape)
        self.mask = torch.ones_like(self.rollout, dtype=torch.long)

    @staticmethod
    def reward(response: tuple[int, ...]) -> float:
        return REWARDS[response[0]].mean().item() if len(response) == 1 else REWARDS[response].item()

    def log_probs(self, responses: list[tuple[int, ...]]) -> Tensor:
        """log π of each token, with gradient."""
        rows = []
        for response in responses:
            row = [self.first.log_softmax(-1)[response[0]]]
            row += [self.second[response[0]].log_softmax(-1)[b] for b in response[1:]]
            rows.append(torch.stack(row))
        return torch.stack(rows)

    def gradient(self, value: Tensor) -> Tensor:
        """Of a scalar, with respect to the whole table."""
        grads = torch.autograd.grad(value, (self.first, self.second), retain_graph=True, allow_unused=True)
        return torch.cat([(torch.zeros(VOCAB, VOCAB) if g is None else g).double().flatten() for g in grads])

    def restricted(self, responses: list[tuple[int, ...]] | None = None) -> Tensor:
        """-Σ_y π(y) A(y) ∇log π(y) over these responses; by default those that μ can draw."""
        responses = self.responses if responses is None else responses
        log_prob = self.log_probs(responses).sum(-1)
        advantages = tensor([self.reward(y) - 0.7 for y in responses], dtype=torch.float64)
        return self.gradient(-(log_prob.exp().detach() * advantages * log_prob).sum())

    def whole(self) -> Tensor:
        """The same over all responses: the policy gradient."""
        return self.restricted(list(itertools.product(range(VOCAB), repeat=self.rollout.shape[1])))

    def expected(self, loss: Any) -> Tensor:
        """E_μ of the gradient of ``loss(rows)``, which gives one row's scalar."""
        return sum((self.mu[i].item() * self.gradient(loss([i])) for i in range(len(self.responses))), torch.zeros(()))

    def decoupled(self, correction: RolloutCorrectionConfig) -> Tensor:
        columns = {
            "old_log_probs": self.log_prob.detach(),
            "rollout_log_probs": self.rollout,
            "response_mask": self.mask,
        }
        batch, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors=columns), correction)
        weights = batch.batch.get("rollout_is_weights", None)

        def loss(rows: list[int]) -> Tensor:
            own = None if weights is None else weights[rows]
            data = (columns["old_log_probs"][rows], self.log_prob[rows], self.advantages[rows], self.mask[rows])
            return compute_policy_loss_vanilla(*data, "token-sum", ActorConfig(), own)[0]

        return self.expected(loss)

    def bypass(self, correction: RolloutCorrectionConfig) -> Tensor:
        batch = DataProto.from_dict(tensors={"rollout_log_probs": self.rollout})
        apply_bypass_mode(batch)
        old = batch.batch["old_log_probs"]
        settings = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
        config = ActorConfig(policy_loss=settings, clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=1e9)

        def loss(rows: list[int]) -> Tensor:
            data = (old[rows], self.log_prob[rows], self.advantages[rows], self.mask[rows])
            return compute_policy_loss_bypass_mode(*data, "token-sum", config)[0]

        return self.expected(loss)


@pytest.mark.parametrize("way", WAYS)
def test_token_weights_repair_one_token_exactly(way: dict[str, Any]):
    """Σ_v μ(v)·(π/μ)·A·∇log π is Σ_{v kept} π·A·∇log π."""
    case = Case(1, **way)
    token = RolloutCorrectionConfig.decoupled_token_is()
    assert_close(case.decoupled(token), case.restricted(), rtol=1e-5, atol=1e-6)
    inside = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    assert_close(case.bypass(inside), case.restricted(), rtol=1e-5, atol=1e-6)
    # The ratio of ppo_clip is the weight; here its bounds are wide open.
    assert_close(case.bypass(RolloutCorrectionConfig.bypass_ppo_clip()), case.restricted(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_sequence_weights_repair_whole_responses_exactly(way: dict[str, Any]):
    case = Case(2, **way)
    assert len(case.responses) < VOCAB**2
    sequence = RolloutCorrectionConfig.decoupled_seq_is()
    assert_close(case.decoupled(sequence), case.restricted(), rtol=1e-5, atol=1e-6)
    assert_close(case.bypass(RolloutCorrectionConfig.bypass_pg_is()), case.restricted(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_without_weights_the_gradient_is_another(length: int, way: dict[str, Any]):
    case = Case(length, **way)
    unweighted, right = case.decoupled(RolloutCorrectionConfig.disabled()), case.restricted()
    assert (unweighted - right).norm() > 0.05 * right.norm()


def test_token_weights_leave_the_prefixes_of_longer_responses_as_they_were_drawn():
    """Their bias, measured: less than without weights, and not zero as with sequence weights."""
    case = Case(2, top_p=0.7)
    right = case.restricted()
    token, none, sequence = (
        (case.decoupled(c) - right).norm().item()
        for c in (
            RolloutCorrectionConfig.decoupled_token_is(),
            RolloutCorrectionConfig.disabled(),
            RolloutCorrectionConfig.decoupled_seq_is(),
        )
    )
    assert sequence < 1e-6 < token < none


@pytest.mark.parametrize("length", [1, 2])
def test_what_is_never_drawn_stays_missing(length: int):
    """No weight can bring back the terms of tokens outside of the cut: that gap is the price of truncation."""
    case = Case(length, top_p=0.7)
    cut = [y for y in itertools.product(range(VOCAB), repeat=length) if y not in set(case.responses)]
    assert cut
    assert_close(case.whole() - case.restricted(), case.restricted(cut))
    assert case.restricted(cut).norm() > 0.05 * case.whole().norm()


@pytest.mark.parametrize("length", [1, 2])
def test_without_truncation_all_are_the_policy_gradient(length: int):
    case = Case(length)
    assert len(case.responses) == VOCAB**length
    for correction in (
        RolloutCorrectionConfig.disabled(),
        RolloutCorrectionConfig.decoupled_token_is(),
        RolloutCorrectionConfig.decoupled_seq_is(),
    ):
        assert_close(case.decoupled(correction), case.whole(), rtol=1e-5, atol=1e-6)


def test_weights_of_truncation_are_the_mass_that_was_kept():
    """π/μ = Z ≤ 1, the same for every token of a step: the cap of truncated importance sampling never binds."""
    case = Case(1, top_k=2)
    kept = FIRST.double().softmax(-1)[[y[0] for y in case.responses]].sum()
    assert_close((case.log_prob.squeeze(-1) - case.rollout.squeeze(-1)).exp(), kept.expand(2), rtol=1e-6, atol=0.0)
