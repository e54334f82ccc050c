"""What a step did with each of its data sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def source_metrics(sources: Sequence[str], scores: Sequence[float], lengths: Sequence[float]) -> dict[str, float]:
    """Score, response length and number of responses by data source.

    >>> source_metrics(["a", "b", "a"], [1.0, 0.0, 0.0], [4, 5, 8])["train-source/a/score/mean"]
    0.5

    Args:
        sources: (bsz,) the ``data_source`` of each response.
        scores: (bsz,) its summed ``token_level_scores``; nan where scoring failed, which no mean counts.
        lengths: (bsz,) its tokens.

    Returns:
        ``train-source/{source}/score/mean`` (left out where nothing of the source was scored),
        ``train-source/{source}/response_length/mean`` and ``train-source/{source}/count``.
    """
    names, values, tokens = np.asarray(sources, dtype=object), np.asarray(scores, float), np.asarray(lengths, float)
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        rows = names == source
        scored = values[rows][~np.isnan(values[rows])]
        if len(scored):
            metrics[f"train-source/{source}/score/mean"] = float(scored.mean())
        metrics[f"train-source/{source}/response_length/mean"] = float(tokens[rows].mean())
        metrics[f"train-source/{source}/count"] = float(rows.sum())
    return metrics
