"""Reduction of metrics over parts, and times of stages; for the driver and the workers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch

from verl.errors import ConfigError, SchemaError

Metrics = dict[str, float]
"""Numbers by name."""

GB = 1024**3


class AggregationType(Enum):
    """Reduction of the values of a :class:`Metric` to a single one."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Metric:
    """Values of one metric with the way in which they become one, whatever its name.

    Args:
        aggregation: a member of ``AggregationType``, or its name.
        value: the first value, or several.

    >>> Metric("max", [1.0, 3.0]).aggregate()
    3.0
    """

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        aggregations = {kind.value: kind for kind in AggregationType}
        name = aggregation.value if isinstance(aggregation, AggregationType) else aggregation.lower()
        if name not in aggregations:
            raise ConfigError(f"aggregation '{aggregation}' is unknown. Use one of: {', '.join(aggregations)}.")
        self.aggregation = aggregations[name]
        self.values: list[float] = []
        if value is not None:
            (self.extend if isinstance(value, list) else self.append)(value)

    def append(self, value: Any) -> None:
        """Add a number (also a tensor or array of one), or all values of another metric."""
        if isinstance(value, Metric):
            self.extend(value)
        else:
            self.values.append(float(value))

    def extend(self, values: Metric | Sequence[object]) -> None:
        """Add several values, or those of another metric with the same aggregation."""
        if isinstance(values, Metric):
            if values.aggregation != self.aggregation:
                raise ConfigError(
                    f"a metric of {self.aggregation.value} cannot take the values of one of {values.aggregation.value}."
                )
            self.values += values.values
        else:
            for value in values:
                self.append(value)

    def aggregate(self) -> float:
        """Return the one value; NaN if there are none."""
        reduce = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}[self.aggregation.value]
        return float(reduce(self.values)) if self.values else math.nan

    @classmethod
    def chain(cls, metric_lists: Sequence[Metric]) -> Metric:
        """Join metrics of the same aggregation, as of several ranks, to one with all their values."""
        joined = metric_lists[0].init_list()
        for metric in metric_lists:
            joined.extend(metric)
        return joined

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence[Metric]) -> float:
        """Return the one value over ranks with equally many values each, of which a sum takes the mean of the ranks.

        Raises:
            ConfigError: ranks have different numbers of values, whose mean or sum would depend on the ranks.
        """
        joined, lengths = cls.chain(metric_lists), [len(metric.values) for metric in metric_lists]
        if len({*lengths}) > 1 and joined.aggregation in (AggregationType.MEAN, AggregationType.SUM):
            raise ConfigError(
                f"a {joined.aggregation.value} over ranks takes equally many values of each, got {lengths}."
            )
        return joined.aggregate() / (len(lengths) if joined.aggregation == AggregationType.SUM else 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, object], aggregation: str | AggregationType) -> dict[str, Metric]:
        """Make a metric of each value."""
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """Return an empty metric of the same aggregation."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Reduce each metric to its mean; to its maximum or minimum if a word of its name is ``max`` or ``min``.

    A :class:`Metric`, or a list of those of several micro-batches, is reduced in its own way. A metric without values
    is left out.

    {"actor/loss": [1.0, 3.0], "critic/score/max": [1.0, 3.0]}  →  2.0 and 3.0

    Raises:
        SchemaError: a value is no number.
    """
    reduced: dict[str, float] = {}
    for name, values in metrics.items():
        if isinstance(values, list) and values and all(isinstance(value, Metric) for value in values):
            values = Metric.chain(values)
        if isinstance(values, Metric):
            if values.values:
                reduced[name] = values.aggregate()
        elif (numbers := _numbers(name, values)).size:
            reduced[name] = float(_reducer(name)(numbers))
    return reduced


def _numbers(name: str, values: object) -> np.ndarray:
    try:
        if any(value is None for value in (values if isinstance(values, (list, tuple)) else [values])):  # NumPy: NaN
            raise TypeError("None is no number")
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"metric '{name}' is {values!r:.100}, which cannot be reduced: {error}. A metric is a number or a list of "
            "numbers; leave out what has no value, and use NaN for one that is undefined."
        ) from error


def _reducer(name: str) -> Callable[[np.ndarray], float]:
    words = re.split(r"[/_@]", name)
    if "max" in words:
        return np.max
    return np.min if "min" in words else np.mean


def distribution(values: Sequence[float] | torch.Tensor, prefix: str) -> dict[str, float]:
    """``{prefix}/mean``, ``/max``, ``/min``; NaN if there are no values."""
    numbers = torch.as_tensor(values, dtype=torch.float32)
    if numbers.numel() == 0:
        return {f"{prefix}/{name}": float("nan") for name in ("mean", "max", "min")}
    return {
        f"{prefix}/mean": numbers.mean().item(),
        f"{prefix}/max": numbers.max().item(),
        f"{prefix}/min": numbers.min().item(),
    }


def number_or_nan(value: Any) -> float:
    """Return a number that a user's code gave as float; NaN for None, and for what is infinite or larger than floats.

    >>> number_or_nan(True), number_or_nan(10**400), number_or_nan(None)
    (1.0, nan, nan)
    """
    try:
        as_float = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return as_float if math.isfinite(as_float) else math.nan


def extreme(name: str, values: Sequence[float]) -> float:
    """The maximum for a name that ends in ``_max``, else the minimum; NaN if any value is, whatever the order.

    >>> extreme("x_max", [1.0, 2.0]), extreme("x_max", [2.0, float("nan")])
    (2.0, nan)
    """
    # max() and min() compare with NaN, so their result would depend on the order.
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if name.endswith("_max") else min(values)


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the wall-clock seconds of the block to ``timing_raw[name]``, also if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
