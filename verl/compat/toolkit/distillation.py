"""Losses of distillation in the public form: (config, distillation_config, model_output, data) → (losses, metrics).

``config`` is ``actor_rollout_ref.actor``; ``model_output`` has ``log_probs`` and, for losses of the teacher's most
likely tokens, ``topk_log_probs``; ``data`` has ``response_mask`` and the columns of the teacher. The losses are per
token, (bsz, response_length).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from verl.algorithms.distillation import (
    DISTILLATION_LOSSES,
    DistillationLossSettings,
    DistillationResult,
    distillation_loss_info,
    register_distillation_loss,
)
from verl.base.registry import RegistryView
from verl.config import ActorConfig, DistillationConfig
from verl.utils.metric import AggregationType, Metric


def get_distillation_loss_fn(loss_name: str) -> Callable[..., DistillationResult]:
    """Look up a divergence in the public form.

    Raises:
        ConfigError: there is none; the message lists the known names.
    """
    return distillation_loss_info(loss_name).public_form


def get_distillation_loss_settings(loss_name: str) -> DistillationLossSettings:
    """Look up how a divergence was registered.

    Raises:
        ConfigError: there is none.
    """
    return distillation_loss_info(loss_name).settings


def compute_distillation_loss_range(distillation_losses: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """Return the least and the largest loss of the valid tokens; both arguments are (bsz, response_length)."""
    valid = distillation_losses.detach()[response_mask.bool()]
    return {
        "distillation/loss_min": Metric(AggregationType.MIN, valid.amin() if valid.numel() else None),
        "distillation/loss_max": Metric(AggregationType.MAX, valid.amax() if valid.numel() else None),
    }


def compute_forward_kl_topk(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
) -> DistillationResult:
    """KL(teacher ‖ policy) over the teacher's most likely tokens and one class of all others."""
    return get_distillation_loss_fn("forward_kl_topk")(config, distillation_config, model_output, data)


def compute_distillation_loss_reverse_kl_estimator(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
) -> DistillationResult:
    """The estimate of KL(policy ‖ teacher) from the sampled tokens that ``loss_mode`` names."""
    name = distillation_config.distillation_loss.loss_mode
    return get_distillation_loss_fn(name)(config, distillation_config, model_output, data)


DISTILLATION_LOSS_REGISTRY = RegistryView(
    DISTILLATION_LOSSES,
    get_distillation_loss_fn,
    lambda name: register_distillation_loss(DistillationLossSettings(names=name, use_estimator=True)),
)
