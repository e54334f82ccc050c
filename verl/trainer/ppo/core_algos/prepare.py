"""What an update has to know of its whole mini-batch, made once before the rows are dealt to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl.schema import require
from verl.trainer.ppo.core_algos.aggregate import prepare_aggregation
from verl.trainer.ppo.core_algos.entropy import top_entropy_mask
from verl.trainer.ppo.core_algos.registry import policy_loss_info, prepare_policy_loss


def prepare_update(columns: Mapping[str, Any], config: Any, seed: int) -> dict[str, Tensor]:
    """The columns that the policy's update needs beside those of the stages before it.

    A loss is computed on micro-batches, and their sum is the loss of the mini-batch. Whatever
    depends on the other rows of the mini-batch is therefore decided here, and travels with the rows:

    - ``row_weights`` for ``loss_agg_mode=prompt-mean``;
    - ``top_entropy_mask`` for ``policy_loss.top_entropy_quantile`` below 1;
    - what the loss itself registered, such as ``cov_selected``.

    Args:
        columns: of one whole mini-batch, all ranks' rows in the order of the batch, by name:
            response_mask, and those that the settings ask for: old_log_probs, advantages, entropys;
            ``index``, an array of group ids.
        config: the actor's section.
        seed: of random draws; give each mini-batch its own.

    Returns:
        columns by name, with as many rows; empty for most settings.

    Raises:
        SchemaError: a column is missing; the message says who makes it.
        ConfigError: there is no such loss.
    """
    settings = config.policy_loss
    made: dict[str, Tensor] = {}
    if config.loss_agg_mode == "prompt-mean":
        # The group ids are called `index` here; the batch calls them `uid`.
        require(columns, ("response_mask", "index" if "index" in columns else "uid"), "loss_agg_mode=prompt-mean")
        made |= prepare_aggregation("prompt-mean", columns["response_mask"], columns["index"])
    if settings.top_entropy_quantile < 1:
        require(columns, ("response_mask", "entropys"), "policy_loss.top_entropy_quantile")
        kept = top_entropy_mask(columns["entropys"], columns["response_mask"], settings.top_entropy_quantile)
        made["top_entropy_mask"] = kept
    return made | prepare_policy_loss(settings.loss_mode, columns, config, seed)


def update_columns(config: Any) -> frozenset[str]:
    """Names of the columns without which the policy's update cannot run, beside its usual ones.

    Args:
        config: the actor's section.

    Raises:
        ConfigError: there is no such loss.
    """
    info = policy_loss_info(config.policy_loss.loss_mode)
    needed = set(info.columns | info.prepared_columns)
    if config.loss_agg_mode == "prompt-mean":
        needed.add("row_weights")
    if config.policy_loss.top_entropy_quantile < 1:
        needed.add("top_entropy_mask")
    return frozenset(needed)
