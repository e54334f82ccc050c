"""Metrics that any process can make or reduce, the driver and the workers alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

GB = 1024**3


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number for each metric of several parts: the mean; the largest, if a word of its name is ``max``; the
    smallest, if one is ``min``.

        {"actor/loss": [1.0, 3.0], "critic/score/max": [1.0, 3.0]}  →  2.0 and 3.0

    Args:
        metrics: a number or a sequence of numbers by name.
    """
    return {name: float(_reducer(name)(np.asarray(values, dtype=np.float64))) for name, values in metrics.items()}


def _reducer(name: str) -> Any:
    words = re.split(r"[/_@]", name)
    if "max" in words:
        return np.max
    return np.min if "min" in words else np.mean


def distribution(values: Sequence[float] | torch.Tensor, prefix: str) -> dict[str, float]:
    """``{prefix}/mean``, ``/max``, ``/min``; NaN where there is nothing to describe."""
    numbers = torch.as_tensor(values, dtype=torch.float32)
    if numbers.numel() == 0:
        return {f"{prefix}/{name}": float("nan") for name in ("mean", "max", "min")}
    return {
        f"{prefix}/mean": numbers.mean().item(),
        f"{prefix}/max": numbers.max().item(),
        f"{prefix}/min": numbers.min().item(),
    }


def extreme(name: str, values: Sequence[float]) -> float:
    """The largest of ``values`` for a name that ends in ``_max``, else the smallest; NaN if one is, wherever it is.

    >>> extreme("x_max", [1.0, 2.0]), extreme("x_max", [2.0, float("nan")])
    (2.0, nan)
    """
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if name.endswith("_max") else min(values)


def memory_metrics() -> dict[str, float]:
    """``perf/`` memory of this process's GPU (peaks, if it has one) and of the machine, in GiB."""
    metrics = {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / GB}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GB
    return metrics
