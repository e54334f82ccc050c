"""Our formulas against the code of TRL (https://github.com/huggingface/trl, 1.16), on random input.

TRL computes inside the methods of its trainers. Here they run on an instance that holds only what those methods
read, with a model that returns the log-probs, entropies and scores it was given. ``make proofs`` installs TRL; without
it these tests are skipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.losses import actor, batch
from verl.algorithms import (
    compute_gdpo_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    prepare_update,
)
from verl.algorithms.preference import (
    bradley_terry_loss,
    direct_preference_loss,
    implicit_rewards,
    reward_centering,
    sequence_log_probs,
    split_pairs,
)
from verl.algorithms.rollout_correction import (
    importance_ratio,
    importance_weights,
    log_ratio_of,
    parse_is_threshold,
)
from verl.protocol import DataProto
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.engine import BatchTotals
from verl.workers.losses import PolicyLoss

F64 = torch.float64
SEEDS = range(3)
SMOOTHING = 0.1
TRL_EPSILON = 1e-4  # what TRL adds to a standard deviation; ours is an argument, and 1e-6 by default


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return pytest.importorskip(
        "trl", minversion="1.16", reason="compares with TRL, the extra 'peers'; `make proofs` installs it"
    )


class Given(torch.nn.Module):
    """A model whose answer is known: what it was made with, whatever it is asked."""

    is_gradient_checkpointing = False

    def __init__(self, **outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(**self.outputs)


def bare(trainer_class: type, model: Given, **attributes: Any) -> Any:
    """An instance with these attributes and no more, in training mode, on one process."""
    from accelerate import Accelerator

    trainer = object.__new__(trainer_class)
    trainer.__dict__ |= {
        "accelerator": Accelerator(cpu=True),
        "model": model.train(),
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        **attributes,
    }
    return trainer


# ---- policy losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The same loss in both configurations."""

    loss: str = "vanilla"
    mode: str
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changes of the actor's section."""
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of ``policy_loss``."""
    trl: dict[str, Any]
    per_row: bool = False
    """All tokens of a response have one advantage."""


# TRL has no dual clip unless delta is set; a bound that no ratio reaches turns ours off. Its delta is our clip_ratio_c.
UNBOUNDED = {"clip_ratio_c": 1e9}
CASES = {
    "grpo": Case(mode="seq-mean-token-mean", ours=UNBOUNDED, trl={"loss_type": "grpo"}),
    "bnpo": Case(mode="token-mean", ours=UNBOUNDED, trl={"loss_type": "bnpo"}),
    "dapo": Case(mode="token-mean", ours=UNBOUNDED, trl={"loss_type": "dapo"}),
    "dr_grpo": Case(
        mode="seq-mean-token-sum-norm",
        ours=UNBOUNDED | {"loss_scale_factor": 7},
        trl={"loss_type": "dr_grpo", "max_completion_length": 7},
    ),
    "two-sided clipping": Case(mode="token-mean", ours={"clip_ratio_c": 1.5}, trl={"loss_type": "bnpo", "delta": 1.5}),
    "cispo": Case(  # TRL's epsilon_high is the bound itself, ours its distance from 1; TRL has no lower bound
        loss="cispo",
        mode="token-mean",
        ours={"clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
        trl={"loss_type": "cispo", "epsilon_high": 1.5},
    ),
    "gspo": Case(
        loss="gspo",
        mode="seq-mean-token-mean",
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence"},
        per_row=True,
    ),
    "luspo": Case(
        loss="luspo",
        mode="seq-mean-token-sum",
        trl={"loss_type": "luspo", "importance_sampling_level": "sequence"},
        per_row=True,
    ),
    "sapo": Case(  # temperatures that float32, in which TRL holds them, can hold
        loss="sapo",
        mode="seq-mean-token-mean",
        ours={"tau_pos": 0.75, "tau_neg": 1.25},
        trl={"loss_type": "sapo", "sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.25},
    ),
    "KL": Case(  # TRL's default multiplies its k3 by the ratio, which is off here
        mode="seq-mean-token-mean",
        ours=UNBOUNDED | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
        trl={"loss_type": "grpo", "beta": 0.3},
    ),
    "entropy": Case(  # TRL's bonus is the mean over tokens, whatever the loss is; ours follows loss_agg_mode
        mode="token-mean",
        ours=UNBOUNDED | {"entropy_coeff": 0.2},
        trl={"loss_type": "bnpo", "entropy_coef": 0.2},
    ),
    "top entropy": Case(
        mode="token-mean",
        ours=UNBOUNDED,
        own={"top_entropy_quantile": 0.3},
        trl={"loss_type": "dapo", "top_entropy_quantile": 0.3},
    ),
    "all at once": Case(
        mode="token-mean",
        ours={"clip_ratio_c": 1.5, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
        own={"top_entropy_quantile": 0.5},
        trl={"loss_type": "dapo", "delta": 1.5, "beta": 0.1, "top_entropy_quantile": 0.5},
    ),
}


def our_loss(case: Case, data: dict[str, Tensor], weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The policy's loss as an update computes it, and its gradient by the log-probs."""
    config = actor(case.loss, case.own, loss_agg_mode=case.mode, **case.ours)
    columns = data | prepare_update(data, config, 0)
    if weights is not None:
        columns["rollout_is_weights"] = weights
    log_probs = columns.pop("log_probs").clone().requires_grad_()
    outputs = {"log_probs": log_probs, "entropy": columns["entropys"]}
    tokens, rows = int(data["response_mask"].sum()), len(data["response_mask"])
    totals = BatchTotals(dp_size=1, batch_num_tokens=tokens, global_batch_size=rows)
    loss, _ = PolicyLoss(config)(outputs, DataProto.from_dict(tensors=columns), totals)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad


def trl_loss(trl: ModuleType, case: Case, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """GRPOTrainer's, and its gradient by the log-probs."""
    log_probs, mask = data["log_probs"].clone().requires_grad_(), data["response_mask"]
    given = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": None, "beta": 0.0, "entropy_coef": 0.0} | case.trl
    args = SimpleNamespace(
        delta=given["delta"],
        use_bias_correction_kl=False,
        steps_per_generation=1,
        report_to=[],
        sapo_temperature_pos=given.get("sapo_temperature_pos"),
        sapo_temperature_neg=given.get("sapo_temperature_neg"),
    )
    model = Given(log_probs=log_probs, entropy=data["entropys"])
    trainer = bare(
        trl.GRPOTrainer,
        model,
        args=args,
        loss_type=given["loss_type"],
        beta=given["beta"],
        epsilon_low=given["epsilon"],
        epsilon_high=given["epsilon_high"],
        importance_sampling_level=given.get("importance_sampling_level", "token"),
        max_completion_length=given.get("max_completion_length"),
        top_entropy_quantile=given.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=None,
        use_vllm="importance_sampling_ratio" in data,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=given["entropy_coef"] != 0,
        use_adaptive_entropy=False,
        entropy_coef=given["entropy_coef"],
    )
    rows = len(mask)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": data["advantages"][:, 0] if case.per_row else data["advantages"],
        "old_per_token_logps": data["old_log_probs"],
        "ref_per_token_logps": data["ref_log_prob"],
        "num_items_in_batch": mask.sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = data["importance_sampling_ratio"]
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad


def compare_losses(trl: ModuleType, case: Case, seed: int) -> None:
    data = batch(seed, rows=8, width=7, spread=0.5, per_row=case.per_row)
    if "top_entropy_quantile" in case.own:  # TRL takes the quantile in float32
        data["entropys"] = data["entropys"].float()
    found, gradient = our_loss(case, data)
    expected, expected_gradient = trl_loss(trl, case, data)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert (gradient != 0).any()


@pytest.mark.proof("peer", "vanilla", "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "bnpo", "dapo", "dr_grpo", "two-sided clipping", "entropy", "top entropy"])
def test_the_clipped_loss(trl: ModuleType, name: str, seed: int):
    compare_losses(trl, CASES[name], seed)


@pytest.mark.proof("peer", param="name")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["cispo", "gspo", "luspo", "sapo"])
def test_the_other_losses(trl: ModuleType, name: str, seed: int):
    compare_losses(trl, CASES[name], seed)


@pytest.mark.proof("peer", "seq-mean-token-sum")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_sum_over_tokens(trl: ModuleType, seed: int):
    compare_losses(trl, CASES["luspo"], seed)


@pytest.mark.proof("peer", "k3", "low_var_kl")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["KL", "all at once"])
def test_the_kl_term(trl: ModuleType, name: str, seed: int):
    compare_losses(trl, CASES[name], seed)


def test_the_cases_reach_what_they_are_about():
    """Random input that no bound ever cuts would show nothing."""
    data = batch(0, rows=8, width=7, spread=0.5)
    ratio, A = (data["log_probs"] - data["old_log_probs"]).exp(), data["advantages"]
    valid = data["response_mask"].bool()
    for reached in (
        (ratio > 1.3) & (A > 0),
        (ratio < 0.8) & (A < 0),
        (ratio > 1.5) & (A < 0),  # two-sided clipping
        (ratio > 1.5) & (A > 0),  # CISPO's bound
    ):
        assert (reached & valid).any()
    assert (valid.sum(-1) == 0).any() or (batch(1, rows=8, width=7)["response_mask"].sum(-1) == 0).any()


# ---- advantages


def sampled(trainer_class: type, rewards: Tensor, mask: Tensor, model: Given, **attributes: Any) -> dict[str, Tensor]:
    """What the trainer makes of responses that are already there, and of their rewards."""

    class Sampled(trainer_class):
        def _generate(self, prompts: list) -> tuple:
            ids = [[1] * int(length) for length in mask.sum(-1)]
            sampling = attributes.get("sampling")
            logps = None if sampling is None else [row[: len(i)].tolist() for row, i in zip(sampling, ids, strict=True)]
            if trainer_class.__name__ == "RLOOTrainer":
                return [[1]] * len(ids), ids, [""] * len(ids)
            return [[1]] * len(ids), ids, None, [""] * len(ids), logps, {}, None, None

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return rewards

    args = SimpleNamespace(
        per_device_train_batch_size=len(mask),
        gradient_checkpointing_kwargs=None,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        report_to=[],
    )
    logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
    trainer = bare(
        Sampled,
        model,
        args=args,
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        ref_model=None,
        reward_weights=torch.ones(rewards.shape[1], dtype=rewards.dtype),
        reward_funcs=[None] * rewards.shape[1],
        reward_func_names=[f"reward {k}" for k in range(rewards.shape[1])],
        reward_clip_range=None,
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
        **{"beta": 0.0, "use_vllm": False, "vllm_importance_sampling_correction": True} | attributes,
    )
    return trainer._generate_and_score_completions([{"prompt": ""}] * len(mask))


def scored(seed: int, groups: int = 4, size: int = 3, components: int = 1) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Rewards (rows, components), a mask of ragged responses, and the columns of our estimators."""
    g = torch.Generator().manual_seed(seed)
    rows, width = groups * size, 5
    rewards = torch.randint(0, 3, (rows, components), generator=g).to(F64) + torch.rand(
        (rows, components), generator=g, dtype=F64
    )
    rewards[:size] = rewards[0]  # siblings that all have the same reward
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    lengths[-1] = width
    mask = (torch.arange(width) < lengths).long()
    per_token = torch.zeros(rows, width, dtype=F64).scatter(1, lengths - 1, rewards.sum(-1, keepdim=True))
    index = np.repeat(np.array([f"prompt {i}" for i in range(groups)], dtype=object), size)
    return rewards, mask, {"token_level_rewards": per_token, "response_mask": mask, "index": index}


def no_model() -> Given:
    return Given(log_probs=torch.zeros(12, 5, dtype=F64), entropy=torch.zeros(12, 5, dtype=F64))


@pytest.mark.proof("peer", "grpo", "grpo_vectorized")
@pytest.mark.parametrize("scale", ["group", "none", "batch"])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_relative_advantages(trl: ModuleType, scale: str, seed: int):
    rewards, mask, columns = scored(seed)
    expected = sampled(
        trl.GRPOTrainer, rewards, mask, no_model(), num_generations=3, scale_rewards=scale,
        multi_objective_aggregation="sum_then_normalize",
    )["advantages"]  # fmt: skip
    by_std = scale == "group"
    found, _ = compute_grpo_outcome_advantage(**columns, epsilon=TRL_EPSILON, norm_adv_by_std_in_grpo=by_std)
    if scale == "batch":  # ours does not divide by the deviation of the batch; what it is divided by is the same
        found = found / (rewards.std() + TRL_EPSILON)
    assert_close(found[:, 0], expected, rtol=1e-7, atol=1e-9)  # TRL corrects its deviation by a float32 factor


@pytest.mark.proof("peer", "rloo", "rloo_vectorized")
@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_advantages(trl: ModuleType, seed: int):
    rewards, mask, columns = scored(seed)
    made = sampled(trl.RLOOTrainer, rewards, mask, no_model(), num_generations=3, normalize_advantages=False)
    found, _ = compute_rloo_outcome_advantage(**columns)
    assert_close(found[:, 0], made["advantages"], rtol=1e-9, atol=1e-9)


@pytest.mark.proof("peer", "gdpo")
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_several_rewards(trl: ModuleType, seed: int):
    """TRL whitens over responses, ours over tokens: the same where all are of one length."""
    rewards, _, columns = scored(seed, components=2)
    mask = torch.ones_like(columns["response_mask"])
    expected = sampled(
        trl.GRPOTrainer, rewards.float().to(F64), mask, no_model(), num_generations=3, scale_rewards="group",
        multi_objective_aggregation="normalize_then_sum",
    )["advantages"]  # fmt: skip
    parts = {"a": rewards[:, 0].numpy(), "b": rewards[:, 1].numpy()}
    found, _ = compute_gdpo_outcome_advantage(mask, columns["index"], ["a", "b"], epsilon=TRL_EPSILON, **parts)  # type: ignore[arg-type]
    # Over n responses the unbiased variance is n/(n-1) of the biased one, over 5n tokens 5n/(5n-1). The tolerance is
    # for the whitening: TRL adds 1e-4 to the deviation, ours 1e-8 to the variance.
    n = len(mask)
    assert_close(
        found[:, 0].double() * math.sqrt((5 * n) * (n - 1) / ((5 * n - 1) * n)), expected, rtol=1e-3, atol=1e-4
    )


# ---- importance weights


@pytest.mark.proof("peer", param="level")
@pytest.mark.parametrize(("theirs", "threshold"), [("truncate", 1.4), ("mask", "0.6_1.4")])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights(trl: ModuleType, level: Any, theirs: str, threshold: float | str, seed: int):
    rewards, mask, _ = scored(seed)
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(mask.shape, generator=g) * 2
    rollout = old + 0.3 * torch.randn(mask.shape, generator=g)
    band = parse_is_threshold(threshold)
    made = sampled(
        trl.GRPOTrainer, rewards, mask, Given(log_probs=old, entropy=old), num_generations=3, scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize", use_vllm=True, sampling=rollout,
        vllm_importance_sampling_mode=f"{level}_{theirs}",
        vllm_importance_sampling_clip_min=band.lower, vllm_importance_sampling_clip_max=band.upper,
    )["importance_sampling_ratio"]  # fmt: skip
    found = importance_weights(importance_ratio(log_ratio_of(old, rollout, mask), mask, level), band)
    valid = mask.bool()
    assert_close(found[valid].float(), made.expand(mask.shape)[valid], rtol=1e-5, atol=1e-6)
    assert (found[valid] == (band.upper if theirs == "truncate" else 0.0)).any()


@pytest.mark.proof("peer", "vanilla")
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_multiply_the_loss_of_a_token(trl: ModuleType, seed: int):
    case, data = CASES["dapo"], batch(seed, rows=8, width=7)
    weights = torch.rand(8, 7, generator=torch.Generator().manual_seed(seed), dtype=F64)
    found, gradient = our_loss(case, data, weights)
    expected, expected_gradient = trl_loss(trl, case, data | {"importance_sampling_ratio": weights})
    assert_close(found, expected)
    assert_close(gradient, expected_gradient)


# ---- preferences


def pairs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the policy and the reference, and the mask, of chosen and rejected in turn; (8, 5) each."""
    g = torch.Generator().manual_seed(seed)
    policy = -torch.rand(8, 5, generator=g, dtype=F64) * 2
    reference = policy + 0.5 * torch.randn(8, 5, generator=g, dtype=F64)
    mask = (torch.arange(5) < torch.randint(1, 6, (8, 1), generator=g)).long()
    return policy, reference, mask


def trl_preference_loss(trl: ModuleType, loss_type: str, beta: float, columns: tuple[Tensor, Tensor, Tensor]) -> Any:
    """DPOTrainer's loss, and its gradient by the log-probs."""
    policy, reference, mask = (torch.cat([column[0::2], column[1::2]]) for column in columns)  # all chosen come first
    policy.requires_grad_()

    def model_of(log_probs: Tensor) -> Given:
        zeros = torch.zeros_like(log_probs)
        return Given(log_probs=log_probs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = bare(
        trl.DPOTrainer,
        model_of(policy),
        ref_model=model_of(reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, report_to=[]),
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=SMOOTHING,
        use_weighting=False,
    )
    no_prompt = torch.zeros(len(mask), 1, dtype=torch.long)
    whole = torch.cat([no_prompt, mask], dim=1)
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "completion_mask": whole}
    loss = trainer._compute_loss(trainer.model, inputs, False)
    loss.backward()
    assert policy.grad is not None
    return loss.detach(), torch.stack(policy.grad.chunk(2), dim=1).flatten(0, 1)


def our_preference_loss(loss_type: Any, beta: float, smoothing: float, columns: tuple[Tensor, Tensor, Tensor]) -> Any:
    policy, reference, mask = columns
    policy = policy.clone().requires_grad_()
    # TRL's IPO takes the mean of a response's log-probs, which is our `average`; the paper's sum is our default.
    log_probs = [sequence_log_probs(column, mask, average=loss_type == "ipo") for column in (policy, reference)]
    rewards = split_pairs(implicit_rewards(*log_probs, beta=beta))
    loss = direct_preference_loss(rewards, beta, loss_type, label_smoothing=smoothing).mean()
    loss.backward()
    return loss.detach(), policy.grad


@pytest.mark.proof("peer", param="loss_type")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_direct_preference_losses(trl: ModuleType, loss_type: str, seed: int):
    columns = pairs(seed)
    assert_close(our_preference_loss(loss_type, 0.4, 0.0, columns), trl_preference_loss(trl, loss_type, 0.4, columns))


@pytest.mark.proof("peer", "sigmoid")
@pytest.mark.parametrize("seed", SEEDS)
def test_label_smoothing(trl: ModuleType, seed: int):
    """TRL has it in a loss that also sorts the pairs of a batch, so here a batch is one pair."""
    policy, reference, mask = pairs(seed)
    for row in range(0, 8, 2):
        pair = policy[row : row + 2], reference[row : row + 2], mask[row : row + 2]
        assert_close(
            our_preference_loss("sigmoid", 0.4, SMOOTHING, pair), trl_preference_loss(trl, "aot_unpaired", 0.4, pair)
        )


@pytest.mark.proof("peer", "sigmoid")
@pytest.mark.parametrize("margin", [None, 0.7])
@pytest.mark.parametrize("centre", [None, 0.01])
def test_the_loss_of_a_reward_model(trl: ModuleType, margin: float | None, centre: float | None):
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=F64)
    model = Given(logits=scores[torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])].unsqueeze(-1))
    trainer = bare(trl.RewardTrainer, model, args=SimpleNamespace(center_rewards_coefficient=centre))
    inputs = {"attention_mask": torch.ones(8, 3)} | ({} if margin is None else {"margin": torch.full((4,), margin)})
    rewards = split_pairs(scores)
    found = bradley_terry_loss(rewards, margin or 0.0) + (centre or 0.0) * reward_centering(rewards)
    assert_close(found.mean(), trainer.compute_loss(model, inputs))


# ---- what the losses are made of


@pytest.mark.parametrize("seed", SEEDS)
def test_log_probs_and_entropy_of_logits(trl: ModuleType, seed: int):
    from trl.trainer import utils as theirs

    logits = 3 * torch.randn(4, 5, 11, generator=torch.Generator().manual_seed(seed))
    labels = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))
    assert_close(logprobs_from_logits(logits, labels), theirs.selective_log_softmax(logits, labels))
    assert_close(entropy_from_logits(logits), theirs.entropy_from_logits(logits))
