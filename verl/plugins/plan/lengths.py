"""Lengths of responses, of which only the mean and the longest are known.

Of all distributions between 0 and the longest with a given mean, the one with most entropy is assumed: a density
∝ exp(-λ x), cut off at the longest. Where the mean is above half of the longest, λ is negative, and most responses are
long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

_STEEPEST = 700.0  # exp of more overflows


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses in tokens."""

    mean: float
    longest: float

    @property
    def _slope(self) -> float:
        """λ times the longest: by bisection, because the mean falls with it."""
        low, high = -_STEEPEST, _STEEPEST
        for _ in range(60):
            middle = (low + high) / 2
            if _mean_share(middle) > self.mean / self.longest:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    @property
    def mean_at_work(self) -> float:
        """Tokens that a row at work has drawn, on average over time: E[L²] / 2 E[L]."""
        lengths = self.quantiles([(part + 0.5) / 256 for part in range(256)])
        return sum(length**2 for length in lengths) / 2 / sum(lengths)

    def quantiles(self, shares: list[float]) -> list[float]:
        """Lengths below which these shares of the responses are; at least 1 token each."""
        if self.mean >= self.longest:
            return [float(self.longest)] * len(shares)
        slope = self._slope
        if abs(slope) < 1e-6:
            return [max(1.0, share * self.longest) for share in shares]
        total = -math.expm1(-slope)
        return [max(1.0, -math.log1p(-share * total) / slope * self.longest) for share in shares]


def _mean_share(slope: float) -> float:
    """Mean of the distribution between 0 and 1 with the density exp(-slope x)."""
    if abs(slope) < 1e-6:
        return 0.5
    return 1 / slope - 1 / math.expm1(slope)


@lru_cache(maxsize=1024)  # many layouts have the same rows and budgets
def filled_share(lengths: Lengths, prompt: float, budget: float) -> float:
    """Part of a budget of tokens that passes over rows of such responses fill, on average.

    Rows are taken by length, the longest first, each into the first pass that has room for it.

    Args:
        lengths: of responses.
        prompt: tokens of a prompt, computed for each row.
        budget: tokens of a pass, at least those of the longest row.
    """
    rows = [prompt + length for length in reversed(lengths.quantiles([(part + 0.5) / 128 for part in range(128)]))]
    passes: list[float] = []
    for row in rows:
        index = next((index for index, tokens in enumerate(passes) if tokens + row <= budget), len(passes))
        passes[index : index + 1] = [row + (passes[index] if index < len(passes) else 0.0)]
    return sum(rows) / len(passes) / budget
