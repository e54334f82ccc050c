"""Look-ups of distillation losses by name, in the form in which public programs call them."""

from __future__ import annotations

from collections.abc import Callable

from verl.algorithms.distillation import DistillationLossSettings, DistillationResult, distillation_loss_info


def get_distillation_loss_fn(loss_name: str) -> Callable[..., DistillationResult]:
    """Look up a loss as a function of ``config, distillation_config, model_output, data``.

    Raises:
        ConfigError: there is no such loss; the message lists the known names.
    """
    return distillation_loss_info(loss_name).public_form


def get_distillation_loss_settings(loss_name: str) -> DistillationLossSettings:
    """Look up what a loss reads.

    Raises:
        ConfigError: there is no such loss; the message lists the known names.
    """
    return distillation_loss_info(loss_name).settings
