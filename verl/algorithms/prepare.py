"""Columns that an update computes from its whole mini-batch, before the rows are distributed to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from verl.algorithms.aggregate import prepare_aggregation
from verl.algorithms.entropy import top_entropy_mask
from verl.algorithms.loss_registry import policy_loss_columns, policy_loss_info
from verl.errors import ConfigError
from verl.schema import require

if TYPE_CHECKING:
    from verl.config import ActorConfig


def prepare_policy_loss(name: str, columns: Mapping[str, object], config: ActorConfig, seed: int) -> dict[str, Tensor]:
    """Compute the columns that the loss ``name`` needs from a whole mini-batch; see :func:`prepare_update`.

    Raises:
        ConfigError: there is no such loss, or its ``prepare`` returned other columns than it declares.
        SchemaError: a column that ``prepare`` reads is missing.
    """
    info = policy_loss_info(name)
    if info.prepare is None:
        return {}
    prepared = info.prepare(columns, config, seed)
    if prepared.keys() != info.prepared_columns:
        raise ConfigError(
            f"the prepare function of policy loss '{name}' made columns {sorted(prepared)}, but the loss has "
            f"parameters with default None for {sorted(info.prepared_columns)}. Make them the same."
        )
    return prepared


def prepare_update(columns: Mapping[str, Tensor], config: ActorConfig, seed: int) -> dict[str, Tensor]:
    """Compute the columns that the policy's update needs from the whole mini-batch; none for most settings.

    A loss is computed on micro-batches, and their sum is the loss of the mini-batch. Whatever
    depends on other rows of the mini-batch is therefore computed here and passed along as columns:

    - ``row_weights`` for ``loss_agg_mode=prompt-mean``;
    - ``trajectory_count``, and ``row_weights`` for ``seq-mean-token-mean``, if trajectories have several rows;
    - ``top_entropy_mask`` for ``policy_loss.top_entropy_quantile`` below 1;
    - ``observation_weights`` for ``use_echo_loss``;
    - the columns of the loss's own ``prepare``, such as ``cov_selected``.

    Args:
        columns: of one whole mini-batch, all ranks' rows in batch order: response_mask, and as the settings require
            old_log_probs, advantages, entropys; ``index``, an array of group ids; ``trajectory_id``, if trajectories
            have several rows.
        config: the actor section.
        seed: of random draws; give each mini-batch its own.

    Raises:
        SchemaError: a column is missing; the message names the stage that makes it.
        ConfigError: there is no such loss.
    """
    settings = config.policy_loss
    prepared: dict[str, Tensor] = {}
    if config.loss_agg_mode == "prompt-mean":
        # The group ids are called `index` here; the batch calls them `uid`.
        require(columns, ("response_mask", "index" if "index" in columns else "uid"), "loss_agg_mode=prompt-mean")
    if config.loss_agg_mode == "prompt-mean" or "trajectory_id" in columns:
        index, trajectories = columns.get("index", ()), columns.get("trajectory_id")
        prepared |= prepare_aggregation(config.loss_agg_mode, columns["response_mask"], index, trajectories)
    if settings.top_entropy_quantile < 1:
        require(columns, ("response_mask", "entropys"), "top_entropy_quantile")
        entropy_mask = top_entropy_mask(columns["entropys"], columns["response_mask"], settings.top_entropy_quantile)
        prepared["top_entropy_mask"] = entropy_mask
    if config.use_echo_loss:
        require(columns, ("response_mask", "attention_mask", "weight_versions"), "actor.use_echo_loss")
        names = ("response_mask", "attention_mask", "weight_versions")
        prepared["observation_weights"] = observation_weights(*(columns[name] for name in names))
    return prepared | prepare_policy_loss(settings.loss_mode, columns, config, seed)


def observation_weights(response_mask: Tensor, attention_mask: Tensor, weight_versions: Tensor) -> Tensor:
    """Return 1 / N on the N tokens of a mini-batch that the policy read after its first turn and did not draw, else 0.

        L_echo = -Σ_t w_t · log π(y_t)        the mean cross entropy of what the environment wrote

    These are the messages of tools, environments and users with the template's words around them; not tokens that the
    policy drew, and not those of rows without a token to train on.

    Paper: ECHO, https://arxiv.org/abs/2605.24517.

    Args:
        response_mask: (bsz, response_length) of all rows of the mini-batch.
        attention_mask: (bsz, prompt_length + response_length).
        weight_versions: (bsz, response_length), -1 where the policy drew no token.

    Returns:
        (bsz, response_length) float32.
    """
    is_trained = response_mask.bool()
    seen = attention_mask[:, attention_mask.shape[1] - is_trained.shape[1] :].bool()
    observed = seen & ~is_trained & (weight_versions < 0) & is_trained.any(-1, keepdim=True)
    return observed.float() / max(int(observed.sum()), 1)


def update_columns(config: ActorConfig) -> frozenset[str]:
    """Columns that the policy's update requires beyond the usual ones, for an actor section.

    Raises:
        ConfigError: there is no such loss.
    """
    needed = set(policy_loss_columns(config.policy_loss.loss_mode))
    if config.loss_agg_mode == "prompt-mean":
        needed.add("row_weights")
    if config.policy_loss.top_entropy_quantile < 1:
        needed.add("top_entropy_mask")
    if config.policy_loss.off_policy_mask_threshold is not None:
        needed.add("rollout_log_probs")
    if config.use_echo_loss:
        needed.add("observation_weights")
    return frozenset(needed)
