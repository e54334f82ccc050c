"""Comparison of the probabilities of rollout engine and trainer, from :mod:`verl.toolkit.metrics`."""

from verl.toolkit.metrics import calculate_debug_metrics as calculate_debug_metrics
