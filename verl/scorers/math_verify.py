"""Scorer :mod:`.prime_math` under the public name and argument names of ``math_verify``."""

from __future__ import annotations

from verl.scorers import prime_math


def compute_score(model_output: str, ground_truth: object, timeout_score: float = 0.0) -> float:
    """Return 1 if the final answer equals the truth in value, else 0; see :func:`.prime_math.compute_score`.

    There are no time-outs here (:mod:`.math_limits`), so ``timeout_score`` is not used.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    return prime_math.compute_score(model_output, ground_truth)
