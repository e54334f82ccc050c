"""Choice of the source of ``old_log_probs``, the log-probs of the policy before its update.

In general they need a separate forward pass. If a batch is one optimizer step, the update's own forward pass runs on
the same weights, so that its detached log-probs are ``old_log_probs`` and the ratio is 1. In bypass mode the rollout's
log-probs are the old ones, and with A-3PO the policy loss interpolates between them and the current ones. If the update
makes them itself, nothing may read them before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl.algorithms import adv_needs, policy_loss_info

if TYPE_CHECKING:
    from verl.config import PPOConfig

COMPUTED_COLUMNS = frozenset({"old_log_probs", "entropys", "sum_pi_squared"})
"""The columns of a forward pass over the policy before its update."""


@dataclass(frozen=True)
class OldLogProbs:
    """The source of ``old_log_probs`` in a run, and the reason for it."""

    source: Literal["forward", "update", "rollout", "interpolation"]
    """``forward``: a separate forward pass; ``update``: the update's; ``rollout``: the rollout's, in bypass mode;
    ``interpolation``: the policy loss interpolates between the rollout's and the current policy's (A-3PO)."""
    reason: str

    @classmethod
    def from_config(cls, config: PPOConfig, randomness: Mapping[str, float]) -> OldLogProbs:
        """Choose the source for a run.

        Args:
            config: the whole configuration.
            randomness: settings above 0 that make the model's forward pass random in training, such as dropout.
        """
        if config.algorithm.rollout_correction.bypass_mode:
            return cls("rollout", "algorithm.rollout_correction.bypass_mode=true")
        if config.algorithm.rollout_correction.interpolates:
            return cls("interpolation", "algorithm.rollout_correction.prox_logp_method=loglinear")
        if obstacles := list(_obstacles(config, randomness)):
            return cls("forward", "; ".join(obstacles))
        return cls("update", "a batch is one optimizer step, so the update computes the same log-probs")

    def __str__(self) -> str:
        how = {
            "forward": "a forward pass of their own",
            "update": "the update's own forward pass (actor.recompute_old_log_probs=always adds one for them)",
            "rollout": "the rollout engine",
            "interpolation": "the policy loss, which interpolates them by the age of each token",
        }
        return f"old_log_probs come from {how[self.source]}: {self.reason}."


def _obstacles(config: PPOConfig, randomness: Mapping[str, float]) -> Iterator[str]:
    """The reasons why the update's own forward pass cannot give the log-probs; none if it can."""
    actor, trainer, algorithm = config.actor_rollout_ref.actor, config.trainer, config.algorithm
    if actor.recompute_old_log_probs == "always":
        yield "actor.recompute_old_log_probs=always"
    steps = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if steps != 1:
        yield f"a batch is {steps} optimizer steps (train_batch_size, ppo_mini_batch_size, ppo_epochs)"
    if randomness:
        yield f"the model is random in training ({', '.join(f'{k}={v}' for k, v in sorted(randomness.items()))})"
    if algorithm.use_pf_ppo:
        yield "algorithm.use_pf_ppo draws the rows of the update"
    if trainer.max_rollout_actor_probs_diff is not None:
        yield "trainer.max_rollout_actor_probs_diff is checked before the update"
    yield from _readers(config)


def _readers(config: PPOConfig) -> Iterator[str]:
    """The parts of the configuration that read the log-probs or the entropy before the update."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward reads them"
    correction = algorithm.rollout_correction
    if correction.is_decoupled and not correction.weighs_by_response:
        name = "rollout_rs" if correction.rollout_rs is not None else "rollout_is_batch_normalize"
        yield f"algorithm.rollout_correction.{name} reads them of the whole batch"
    needs, info = adv_needs(algorithm.adv_estimator), policy_loss_info(actor.policy_loss.loss_mode)
    read = COMPUTED_COLUMNS | ({"rollout_is_weights"} if correction.is_decoupled else set())
    if needs.wants_all or actor.calculate_sum_pi_squared or read & (needs.columns | needs.optional_columns):
        yield f"algorithm.adv_estimator={algorithm.adv_estimator} reads them"
    if info.prepare is not None or COMPUTED_COLUMNS & (info.columns | info.optional_columns):
        yield f"policy_loss.loss_mode={actor.policy_loss.loss_mode} reads them over the whole mini-batch"
    if actor.policy_loss.top_entropy_quantile < 1:
        yield "policy_loss.top_entropy_quantile reads the entropy"
    if actor.entropy_target is not None:
        yield "actor.entropy_target reads the entropy"
