"""The names by which users import metrics; they live in ``metrics.py``."""

from verl.trainer.ppo.metrics import (
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_rollout_gap_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    reduce_metrics,
)

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_rollout_gap_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]
