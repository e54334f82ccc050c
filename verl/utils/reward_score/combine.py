"""Several rewards in one score, each of them logged."""

from __future__ import annotations

from collections.abc import Mapping

from verl.errors import ConfigError


def weighted_sum(components: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The weighted sum of several rewards as ``score``, and every one of them, unweighted, under its name.

        score = Σ_k weight_k · value_k

    A reward function that returns it trains on the sum and has every component in the metrics.

    Args:
        components: (weight, value) by name.

    Raises:
        ConfigError: no components, or one is called ``score``.

    >>> weighted_sum({"accuracy": (0.9, 1.0), "format": (0.1, 0.0)})
    {'score': 0.9, 'accuracy': 1.0, 'format': 0.0}
    """
    if not components or "score" in components:
        raise ConfigError(
            f"weighted_sum: the components are {', '.join(components) or 'none'}; "
            "give at least one, and none called 'score', which is the name of the sum."
        )
    total = sum(weight * value for weight, value in components.values())
    return {"score": total} | {name: value for name, (_, value) in components.items()}
