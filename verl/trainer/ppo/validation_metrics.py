"""Validation metrics: scores reduced over the responses to each prompt, then averaged over prompts.

With N responses per prompt, m of which have a value (m ≤ N; the others could not be scored)::

    mean@N, std@N                      over the m values (std: population)
    best@k, worst@k  (/mean, /std)     largest and smallest of k values drawn from the m with replacement
    maj@k            (/mean, /std)     value of the most frequent answer among k drawn responses
    pass@k                             chance that one of k responses drawn without replacement has the value 1

for k = 2, 4, 8, ... and N. best@k and worst@k are exact expectations over all draws; maj@k is a bootstrap estimate with
a fixed seed. pass@k is the unbiased estimate of arXiv:2107.03374, and exists for a variable whose values in this data
source are all 0 or 1; pass@1 is mean@N. best@k of the same values is smaller, because it may draw a response twice.

A response without a value is missing data: the names stay those of N and of its powers of two, pass@k draws all
values of a prompt that has fewer than k, and a prompt without any value is left out of the average over prompts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from verl.utils.metric import number_or_nan

N_BOOTSTRAP = 1000
CHUNK_ELEMENTS = 2**22
"""Upper limit of elements in an array of the majority vote, to bound its memory."""

ValidationMetrics = dict[str, dict[str, dict[str, float]]]
"""data source → variable → metric → value."""


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[object],
    infos_dict: Mapping[str, Sequence[object]],
    seed: int = 42,
) -> ValidationMetrics:
    """Reduce validation variables per prompt, then average over the prompts of each data source.

    Variables with text are left out. ``pred`` (the extracted answer, of any hashable type; None is no answer, which
    has a vote too) is the majority's vote.

    Args:
        data_sources: (samples,) name of the data set of each sample.
        sample_uids: (samples,) prompt id of each sample.
        infos_dict: variables, (samples,) each: ``reward``, ``acc``, ``pred``, ... A value that is None or not finite is
            missing.
        seed: of the bootstrap.

    Returns:
        data source → variable → ``mean@N``, ``std@N``, ``best@k/mean``, ...; prompts with different numbers N of
        samples have separate metrics ``@N``. A variable without any value is left out.
    """
    numeric = {name: values for name, values in infos_dict.items() if not any(isinstance(v, str) for v in values)}
    prompts: dict[tuple[str, object], list[int]] = defaultdict(list)
    for position, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[key].append(position)
    ballots = _Ballots(infos_dict["pred"], seed) if "pred" in infos_dict else None
    samples: dict[str, dict[str, dict[str, list[np.ndarray]]]] = {}
    for variable, column in numeric.items():
        values = np.array(list(map(number_or_nan, column)), dtype=np.float64)
        present = ~np.isnan(values)
        is_graded = present & ~np.isin(values, (0, 1))
        graded = set(itertools.compress(data_sources, is_graded))
        for (source, size), rows in _blocks(prompts, present):
            into = samples.setdefault(source, {}).setdefault(variable, defaultdict(list))
            winners = {} if ballots is None else ballots.winners(rows, _draws(size))
            metrics = _reduce(values[rows], size, winners)
            if source not in graded:
                metrics |= {f"pass@{k}": _pass_at(values[rows], k) for k in _draws(size)}
            for name, per_prompt in metrics.items():
                into[name].append(per_prompt)
    return {
        source: {
            variable: {name: float(np.concatenate(parts).mean()) for name, parts in metrics.items()}
            for variable, metrics in variables.items()
        }
        for source, variables in samples.items()
    }


def _blocks(
    prompts: Mapping[tuple[str, object], list[int]], is_present: np.ndarray
) -> Iterator[tuple[tuple[str, int], np.ndarray]]:
    """Yield positions of values, (prompts, m), of prompts with equally many samples and values.

    With the data source and the number N of samples.
    """
    blocks: dict[tuple[str, int, int], list[list[int]]] = defaultdict(list)
    for (source, _), members in prompts.items():
        present = [position for position in members if is_present[position]]
        if present:
            blocks[source, len(members), len(present)].append(present)
    for (source, size, _), rows in blocks.items():
        yield (source, size), np.array(rows)


def _reduce(scores: np.ndarray, size: int, winners: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute all metrics of values (prompts, m) of ``size`` responses; each has shape (prompts,)."""
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


def _pass_at(scores: np.ndarray, k: int) -> np.ndarray:
    """Chance that k of the responses in a row, drawn without replacement, have a 1 among them; scores are 0 or 1.

    1 - C(m-c, k) / C(m, k)            c ones among m scores; k is at most m
    """
    m = scores.shape[1]
    k = min(k, m)
    chance = np.array([1 - comb(m - c, k) / comb(m, k) for c in range(m + 1)])
    return chance[scores.sum(1).astype(np.intp)]


class _Ballots:
    """Votes of responses, and who wins them.

    Args:
        votes: (samples,) the answer of each response.
        seed: of the bootstrap.
    """

    def __init__(self, votes: Sequence[object], seed: int) -> None:
        self._votes, self._seed = votes, seed
        self._cache: dict[tuple[bytes, tuple[int, ...]], dict[int, np.ndarray]] = {}

    def winners(self, rows: np.ndarray, draws: Sequence[int]) -> dict[int, np.ndarray]:
        """Return for each k the index of the winning response in each resample, (prompts, bootstrap).

        The most frequent answer among k drawn responses wins; ties go to the one drawn first. Its index is that of the
        first drawn response with this answer. Variables with values of the same responses share the winners.

        Args:
            rows: (prompts, m) positions of the responses that may be drawn.
            draws: the values of k.
        """
        key = rows.tobytes(), (rows.shape[1], *draws)
        if key not in self._cache:
            self._cache[key] = {k: self._winners_of(self._codes(rows), k) for k in draws}
        return self._cache[key]

    def _codes(self, rows: np.ndarray) -> np.ndarray:
        """Encode answers as integers, equal for equal answers to a prompt; (prompts, m)."""
        codes = np.zeros(rows.shape, dtype=np.int16)
        for index, row in enumerate(rows):
            seen: dict[object, int] = {}
            answers = (self._votes[i] for i in row)
            codes[index] = [seen.setdefault(None if vote != vote else vote, len(seen)) for vote in answers]
        return codes

    def _winners_of(self, ballots: np.ndarray, k: int) -> np.ndarray:
        prompts, size = ballots.shape
        rng = np.random.default_rng(self._seed)
        winners = np.empty((prompts, N_BOOTSTRAP), dtype=np.int16)
        at_once = max(1, CHUNK_ELEMENTS // (N_BOOTSTRAP * k))
        for start in range(0, prompts, at_once):
            part = ballots[start : start + at_once]
            samples = rng.integers(size, size=(len(part), N_BOOTSTRAP, k), dtype=np.int16)
            offsets = np.arange(len(part), dtype=np.int32)[:, None, None] * size
            answers = part.ravel()[samples + offsets]
            supporters = np.zeros(answers.shape, dtype=np.int16)
            for voter in range(k):
                supporters += answers == answers[..., voter : voter + 1]
            first = supporters.argmax(-1)[..., None]
            winners[start : start + at_once] = np.take_along_axis(samples, first, axis=-1)[..., 0]
        return winners


# ---- single prompts ---------------------------------------------------------------------------


def bootstrap_metric(
    data: Sequence[object],
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
    values_of: dict[object, list[float]] = defaultdict(list)
    for item in data:
        values_of[item[vote_key]].append(item[val_key])
    return max(values_of.values(), key=len)[0]
