"""Comparison of the probabilities of rollout engine and trainer, from :mod:`verl.compat.toolkit.metrics`."""

from verl.compat.toolkit.metrics import calculate_debug_metrics as calculate_debug_metrics
