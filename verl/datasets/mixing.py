"""Mix several data sources in one run by weight (``data.source_weights``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from verl.base.registry import suggest
from verl.datasets.sampler import BatchSampler, require_rows, seeded_permutation
from verl.errors import ConfigError


class WeightedSources(BatchSampler):
    """Batches that hold each source in proportion to its weight in ``data.source_weights``.

    Stratified by systematic sampling: a source with share s has floor(B s) or ceil(B s) rows in a batch of B, and B s
    on average. (Independent draws would have the same mean, with variance B s (1 - s).)

    Each source is read in its own epochs, as a seeded shuffle, or in file order without ``data.shuffle``: no row
    repeats before every row of its source came once. So a small source with a large weight repeats, and a large one
    with a small weight is not finished in one epoch of the run, which is as long as the data set.

    The data set must have ``sources()``, the source of every row in order, and name the same sources as the weights.
    """

    def __init__(self, data_source: Sized, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.shuffle: bool = data_config.shuffle
        if not hasattr(data_source, "sources"):
            raise ConfigError(
                f"source_weights needs a data set with a method sources(), and {type(data_source).__name__} has "
                "none. Give it one that lists the source of every row, or leave source_weights empty."
            )
        self.weights = dict(data_config.source_weights)
        self._read_sources()
        self.shares = {name: weight / sum(self.weights.values()) for name, weight in self.weights.items() if weight > 0}
        self.streams = {name: {"epoch": 0, "yielded": 0, "length": len(self.rows[name])} for name in self.shares}
        """For each source: its current epoch, rows read of it, and the epoch's length."""
        self._orders: dict[str, tuple[tuple[int, int], list[int]]] = {}

    def draw(self) -> list[int]:
        """Draw the rows of a batch, sources interleaved at random."""
        generator = np.random.default_rng([self.seed, self.batches])
        counts = round_shares(list(self.shares.values()), self.batch_size, float(generator.random()))
        rows = [iter(self._next(name, count)) for name, count in zip(self.shares, counts, strict=True)]
        # Only the sequence of sources is shuffled; rows of one source keep their order.
        sources = generator.permutation(np.repeat(np.arange(len(counts)), counts))
        return [next(rows[source]) for source in sources]

    def progress(self) -> dict[str, object]:
        """The position in each source."""
        return {name: dict(stream) for name, stream in self.streams.items()}

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore a saved :meth:`progress`; a ``ConfigError`` if the sources differ. Weights may change."""
        if progress.keys() != self.streams.keys():
            raise ConfigError(
                f"source_weights names {', '.join(self.streams)}, and the checkpoint was made with "
                f"{', '.join(progress)}. Resume with the sources that the run began with; weights may change."
            )
        self.streams = {name: dict(stream) for name, stream in progress.items()}

    def _next(self, name: str, count: int) -> list[int]:
        stream, drawn_rows = self.streams[name], []
        while len(drawn_rows) < count:
            if stream["yielded"] == stream["length"]:
                self._read_sources()  # a growing data set may have new rows
                stream.update(epoch=stream["epoch"] + 1, yielded=0, length=len(self.rows[name]))
            rows = self._order(name, stream["epoch"], stream["length"])
            part = rows[stream["yielded"] : stream["yielded"] + count - len(drawn_rows)]
            stream["yielded"] += len(part)
            drawn_rows += part
        return drawn_rows

    def _order(self, name: str, epoch: int, length: int) -> list[int]:
        which, order = self._orders.get(name, (None, []))
        if which != (epoch, length):
            order = self._make_order(name, epoch, length)
            self._orders[name] = (epoch, length), order
        return order

    def _make_order(self, name: str, epoch: int, length: int) -> list[int]:
        rows = self.rows[name]
        if length > len(rows):
            self._read_sources()
            rows = self.rows[name]
            require_rows(rows, length)
        if not self.shuffle:
            return rows[:length]
        # A seed per source (distinct for up to 1009 of them), so that sources of one size get different orders.
        source_index = sorted(self.shares).index(name)
        return [rows[where] for where in seeded_permutation(length, self.seed * 1009 + source_index, epoch)]

    def _read_sources(self) -> None:
        self.rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.dataset.sources()):  # type: ignore[attr-defined]
            self.rows.setdefault(name, []).append(row)
        check_weights(self.weights, list(self.rows))


def round_shares(shares: Sequence[float], size: int, uniform: float) -> list[int]:
    """Round ``share * size`` down or up, so that the counts add up to ``size``.

    Systematic sampling: with C_s the running sum of the exact counts, source s gets floor(C_s + u) - floor(C_(s-1) +
    u). For u = ``uniform`` from [0, 1) the mean is exact. The shares must add up to 1.

    >>> round_shares([0.5, 0.25, 0.25], 6, uniform=0.6)
    [3, 2, 1]
    """
    edges = np.cumsum([0.0, *shares]) * size
    edges[-1] = size
    # A float sum may miss an integer by some ulps, which would change its floor by one.
    near = np.round(edges)
    edges = np.where(np.abs(edges - near) < 1e-9 * max(1, size), near, edges)
    return np.diff(np.floor(edges + min(uniform, 1 - 1e-9))).astype(int).tolist()


def check_weights(weights: Mapping[str, float], sources: Sequence[str]) -> None:
    """Check that weights and data name the same sources, and that a weight is positive, else ``ConfigError``."""
    unknown = [name for name in weights if name not in sources]
    if unknown:
        raise ConfigError(
            f"source_weights names '{unknown[0]}', and no training row has that source."
            f"{suggest(unknown[0], list(sources))} Sources: {', '.join(sorted(sources))}."
        )
    missing = sorted(set(sources) - set(weights))
    if missing:
        raise ConfigError(
            f"source_weights has no weight for {', '.join(missing)}. Give every source a weight; 0 leaves it out."
        )
    if not sum(weights.values()) > 0:
        raise ConfigError(f"source_weights={dict(weights)}: at least one weight must be positive.")
