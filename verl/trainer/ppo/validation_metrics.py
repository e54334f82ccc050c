"""Validation metrics: scores reduced over the responses to each prompt, then averaged over prompts.

With N responses per prompt::

    mean@N, std@N                      over the responses (std: population)
    best@k, worst@k  (/mean, /std)     largest and smallest of k responses drawn with replacement
    maj@k            (/mean, /std)     value of the most frequent answer among k drawn responses

for k = 2, 4, 8, ... and N. best@k and worst@k are exact expectations over all draws; maj@k is a bootstrap estimate with
a fixed seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

N_BOOTSTRAP = 1000
CHUNK_ELEMENTS = 2**22
"""Upper limit of elements in an array of the majority vote, to bound its memory."""

ValidationMetrics = dict[str, dict[str, dict[str, float]]]
"""data source → variable → metric → value."""


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[Any], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> ValidationMetrics:
    """Reduce validation variables per prompt, then average over the prompts of each data source.

    Variables with text are left out. ``pred`` (the extracted answer, of any hashable type) is the majority's vote.

    Args:
        data_sources: (samples,) name of the data set of each sample.
        sample_uids: (samples,) prompt id of each sample.
        infos_dict: variables, (samples,) each: ``reward``, ``acc``, ``pred``, ...
        seed: of the bootstrap.

    Returns:
        data source → variable → ``mean@N``, ``std@N``, ``best@k/mean``, ...; prompts with different numbers N of
        responses have separate metrics ``@N``.
    """
    numeric = {name: values for name, values in infos_dict.items() if not any(isinstance(v, str) for v in values)}
    votes = infos_dict.get("pred")
    found: dict[str, dict[str, dict[str, list[np.ndarray]]]] = {}
    for source, rows in _groups(data_sources, sample_uids):
        winners = {} if votes is None else _winners(_answer_codes(votes, rows), seed)
        for variable, values in numeric.items():
            scores = np.array([[values[i] for i in row] for row in rows], dtype=np.float64)  # (prompts, N)
            into = found.setdefault(source, {}).setdefault(variable, defaultdict(list))
            for name, per_prompt in _reduce(scores, winners).items():
                into[name].append(per_prompt)
    return {
        source: {
            variable: {name: float(np.concatenate(parts).mean()) for name, parts in metrics.items()}
            for variable, metrics in variables.items()
        }
        for source, variables in found.items()
    }


def _groups(data_sources: Sequence[str], sample_uids: Sequence[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield for each data source and number N of responses the positions of the samples, (prompts, N)."""
    prompts: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for position, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[key].append(position)
    blocks: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for (source, _), members in prompts.items():
        blocks[source, len(members)].append(members)
    for (source, _), rows in blocks.items():
        yield source, np.array(rows)


def _answer_codes(votes: Sequence[Any], rows: np.ndarray) -> np.ndarray:
    """Encode answers as integers, equal for equal answers to a prompt; (prompts, N)."""
    codes = np.zeros(rows.shape, dtype=np.int16)
    for number, row in enumerate(rows):
        seen: dict[Any, int] = {}
        codes[number] = [seen.setdefault(votes[i], len(seen)) for i in row]
    return codes


def _reduce(scores: np.ndarray, winners: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute all metrics of scores (prompts, N); each has shape (prompts,)."""
    size = scores.shape[1]
    metrics = {f"mean@{size}": scores.mean(1)}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = scores.std(1)
    for k in _draws(size):
        metrics[f"best@{k}/mean"], metrics[f"best@{k}/std"] = _largest_of(scores, k)
        smallest, metrics[f"worst@{k}/std"] = _largest_of(-scores, k)
        metrics[f"worst@{k}/mean"] = -smallest
        if k in winners:
            values = np.take_along_axis(scores, winners[k].astype(np.intp), axis=1)  # (prompts, bootstrap)
            metrics[f"maj@{k}/mean"], metrics[f"maj@{k}/std"] = values.mean(1), values.std(1)
    return metrics


def _draws(size: int) -> list[int]:
    """The values of k: 2, 4, 8, ... below ``size``, and ``size``; none for a single response."""
    return [] if size == 1 else [2**power for power in range(1, size.bit_length()) if 2**power < size] + [size]


def _largest_of(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact mean and standard deviation of the largest of k draws with replacement from each row.

    P(max = x_(i)) = (i/N)^k - ((i-1)/N)^k        x_(1) ≤ ... ≤ x_(N)
    """
    size = scores.shape[1]
    chance = np.diff((np.arange(size + 1) / size) ** k)
    ordered = np.sort(scores, axis=1)
    mean = ordered @ chance
    variance = ((ordered - mean[:, None]) ** 2) @ chance
    return mean, np.sqrt(variance)


def _winners(ballots: np.ndarray, seed: int) -> dict[int, np.ndarray]:
    """For each k, the index of the winning response in each resample, (prompts, bootstrap).

    The most frequent answer among k drawn responses wins; ties go to the one drawn first. Its index is that of the
    first drawn response with this answer.
    """
    prompts, size = ballots.shape
    winners = {}
    for k in _draws(size):
        rng = np.random.default_rng(seed)
        winners[k] = np.empty((prompts, N_BOOTSTRAP), dtype=np.int16)
        at_once = max(1, CHUNK_ELEMENTS // (N_BOOTSTRAP * k))
        for start in range(0, prompts, at_once):
            part = ballots[start : start + at_once]
            drawn = rng.integers(size, size=(len(part), N_BOOTSTRAP, k), dtype=np.int16)
            offsets = np.arange(len(part), dtype=np.int32)[:, None, None] * size
            answers = part.ravel()[drawn + offsets]
            supporters = np.zeros(answers.shape, dtype=np.int16)
            for voter in range(k):
                supporters += answers == answers[..., voter : voter + 1]
            first = supporters.argmax(-1)[..., None]
            winners[k][start : start + at_once] = np.take_along_axis(drawn, first, axis=-1)[..., 0]
    return winners


# ---- single prompts ---------------------------------------------------------------------------


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = N_BOOTSTRAP,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Estimate (mean, standard deviation) of each statistic in ``reduce_fns`` by bootstrap.

    Draws ``n_bootstrap`` subsets of ``subset_size`` values from ``data`` with replacement.
    """
    rng = np.random.default_rng(seed)
    subsets = [[data[i] for i in rng.integers(len(data), size=subset_size)] for _ in range(n_bootstrap)]
    statistics = [np.array([reduce_fn(subset) for subset in subsets], dtype=np.float64) for reduce_fn in reduce_fns]
    return [(float(values.mean()), float(values.std())) for values in statistics]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return the value of the most frequent vote; ties go to the vote that occurs first.

    Example:
        >>> calc_maj_val([{"pred": "4", "acc": 1}, {"pred": "5", "acc": 0}, {"pred": "4", "acc": 1}], "pred", "acc")
        1
    """
    values_of: dict[Any, list[float]] = defaultdict(list)
    for item in data:
        values_of[item[vote_key]].append(item[val_key])
    return max(values_of.values(), key=len)[0]
