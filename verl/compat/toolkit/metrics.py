"""Metrics for users' trainers, and the logger that writes them to the console."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from verl.protocol import DataProto, with_response_mask
from verl.trainer.ppo.metric_utils import compute_rollout_gap_metrics
from verl.utils.console import metrics_line, show


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """Compute ``training/rollout_probs_diff_{valid,max,mean,std}`` and ``training/rollout_actor_probs_pearson_corr``.

    The metrics of :func:`verl.trainer.ppo.metric_utils.compute_rollout_gap_metrics`, for a batch with
    ``rollout_log_probs``, ``old_log_probs`` and ``responses``; the mask of the responses is ``response_mask`` or,
    without it, the end of ``attention_mask``.
    """
    metrics = compute_rollout_gap_metrics(with_response_mask(data))
    return {name: value for name, value in metrics.items() if name.startswith("training/")}


class LocalLogger:
    """Writes the metrics of a step as one line to standard output, if ``print_to_console``."""

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Nothing is held back."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Write the metrics of ``step``."""
        if self.print_to_console:
            show(metrics_line(step, data))


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log a message with its rank before it; with ``log_only_rank_0`` on rank 0 alone."""
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[Rank %d] %s", rank, message)
