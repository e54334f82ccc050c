"""Seconds of generation, from the bytes and FLOPs of each decoding step.

A step draws a token for every row that is not ended. It takes as long as the slower of reading and computing: weights,
of experts only those that some row goes to, and the keys and values of all rows; besides, every operation takes a least
time, products more than others. Engines of several ranks add up twice in each layer, and exchange tokens where they
share experts. Rows end at different times (:mod:`.lengths`): while some wait, those that end make room for
them; then fewer and fewer are left, and the last steps read all weights for a few rows. The host prepares every row of
every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from verl.plugins.plan.engines import EngineLayout
from verl.plugins.plan.hardware import Cluster
from verl.plugins.plan.lengths import Lengths
from verl.plugins.plan.shapes import ModelShape

_PRODUCTS, _OTHER_KERNELS = 4, 6
"""Matrix products of a layer (queries, keys and values; output; gate and up; down), and other operations: two norms,
rotation, cache, attention, gate."""
_EXPERT_PRODUCTS, _EXPERT_KERNELS = 1, 5
"""The same of a layer with experts, besides: the router; choice, two of sorting, and two of adding up."""
_BYTES_PER_LOGIT = 40
"""Sampling reads or writes logits in fp32 about ten times. An assumption."""
_TILE = 16
"""Rows that one matrix instruction takes: an expert with fewer computes as many."""
_SEGMENTS = 128
"""Parts of a rollout in which as many rows are at work."""


@dataclass(frozen=True)
class EngineWork:
    """Work of one copy of a model in an engine.

    Attributes:
        rows: to answer.
        rows_at_once: at most.
        prompt: tokens of a prompt.
        lengths: of responses.
        rows_of_all: of all engines together, which wait for the longest.
    """

    rows: int
    rows_at_once: int
    prompt: int
    lengths: Lengths
    rows_of_all: int

    def segments(self) -> Iterator[tuple[float, int, float]]:
        """Yield steps, rows at work, and tokens of their prompts and responses in the mean step, part by part."""
        count = self.rows
        lengths = self.lengths.quantiles([(row + 0.5) / count for row in range(count)])
        lengths[-1] = self.lengths.quantiles([1 - 0.5 / max(count, self.rows_of_all)])[0]
        # An order in which neighbours are as different as can be: steps of the golden ratio.
        order = sorted(range(count), key=lambda row: row * 0.6180339887498949 % 1.0)
        waiting = [lengths[row] for row in reversed(order)]
        now = start_sum = 0.0  # steps, and the sum of the steps at which rows at work have begun
        at_work: list[tuple[float, float]] = []  # end and begin
        ends_at_once = max(1, count // _SEGMENTS)
        while waiting or at_work:
            while waiting and len(at_work) < self.rows_at_once:
                heapq.heappush(at_work, (now + waiting.pop(), now))
                start_sum += now
            end = heapq.nsmallest(min(ends_at_once, len(at_work)), at_work)[-1][0]
            rows = len(at_work)
            yield end - now, rows, rows * (self.prompt + (now + end) / 2) - start_sum
            now = end
            while at_work and at_work[0][0] <= now:
                start_sum -= heapq.heappop(at_work)[1]


@lru_cache(maxsize=256)  # many layouts for training have the same rollout
def generation_seconds(shape: ModelShape, cluster: Cluster, work: EngineWork, layout: EngineLayout) -> float:
    """Seconds in which an engine computes its prompts and answers them."""
    decoding = Decoding(shape, cluster, layout)
    step_seconds = (steps * decoding.seconds(rows, tokens) for steps, rows, tokens in work.segments())
    return scoring_seconds(shape, cluster, work.rows, work.prompt, 1, layout) + sum(step_seconds)


def scoring_seconds(
    shape: ModelShape, cluster: Cluster, rows: int, length: int, head_tokens: int, layout: EngineLayout
) -> float:
    """Seconds in which an engine computes rows of ``length`` tokens, and log-probs of ``head_tokens`` of them."""
    ranks, counter = layout.tensor * layout.pipeline, shape.flops()
    attention = rows * length * (length + 1) // 2 * shape.layers * counter.pair_flops
    products = rows * counter.forward_flops([length], head_tokens) - attention
    computing = products / cluster.product_flops + attention / cluster.attention_flops
    return computing / ranks + rows * length * _exchanged_seconds(shape, cluster, layout)


@dataclass(frozen=True)
class Decoding:
    """Decoding steps of an engine."""

    shape: ModelShape
    cluster: Cluster
    layout: EngineLayout

    def seconds(self, rows: int, tokens: float) -> float:
        """Seconds of a step of ``rows`` rows with ``tokens`` tokens, prompts and responses, in each copy."""
        shape, cluster, layout = self.shape, self.cluster, self.layout
        ranks, bandwidth = layout.tensor * layout.pipeline, cluster.memory_bytes_per_s
        (read, multiplied), logits = self._weights, rows * shape.vocabulary * _BYTES_PER_LOGIT / bandwidth
        cached = tokens * layout.row(shape, 1) / bandwidth
        attention = tokens * shape.layers * self._pair_flops / ranks / cluster.attention_flops
        products = max(read, rows * multiplied) / ranks
        experts = self._experts(rows * layout.copies) if shape.experts else 0.0
        on_device = products + experts + max(cached, attention) + logits + self._least
        return on_device + cluster.step_s + rows * (self._exchanged + cluster.row_s)

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """Seconds in which one GPU reads all weights but experts, and multiplies one row by them."""
        shape, cluster, layout = self.shape, self.cluster, self.layout
        linear, head = shape.matrix_parameters - shape.expert_parameters, shape.vocabulary * shape.hidden
        read = (linear * layout.moved_bytes + head * layout.size) / cluster.memory_bytes_per_s
        return read, 2 * (linear / self._flops + head / cluster.product_flops)

    @property
    def _flops(self) -> float:
        """FLOP/s of products with weights of the decoder."""
        return self.cluster.product_flops * self.layout.speedup

    def _experts(self, rows: int) -> float:
        """Seconds of the experts of which some row takes one, if rows choose at random."""
        shape, layout = self.shape, self.layout
        share = shape.active_experts / shape.experts
        touched = 1 - (1 - share) ** rows
        rows_per_expert = max(_TILE, rows * share / touched)
        parameters_per_rank = self._expert_parameters * touched / layout.expert_ranks / layout.pipeline
        return parameters_per_rank * max(
            layout.moved_bytes / self.cluster.memory_bytes_per_s, 2 * rows_per_expert / self._flops
        )

    @cached_property
    def _expert_parameters(self) -> int:
        return self.shape.expert_parameters

    @cached_property
    def _pair_flops(self) -> int:
        """FLOPs of a new token and one that it attends to, in one layer; latent attention reads latent vectors."""
        shape = self.shape
        if shape.latent and self.layout.is_program:
            return 2 * shape.heads * (shape.latent.cached + shape.latent.kv_rank)
        return 2 * (shape.attention_width + shape.output_width)

    @cached_property
    def _least(self) -> float:
        """Seconds of a step besides reading and computing: of every operation, and of sums over ranks."""
        shape, cluster, layout = self.shape, self.cluster, self.layout
        sparse = len(shape.sparse_layers)
        products = _PRODUCTS * shape.layers + _EXPERT_PRODUCTS * sparse + 1
        kernels = _OTHER_KERNELS * shape.layers + _EXPERT_KERNELS * sparse
        seconds = products * cluster.product_s + kernels * cluster.kernel_s
        if layout.tensor > 1:
            seconds += 2 * shape.layers * cluster.sum_latency_s(layout.tensor)
        if layout.copies > 1:
            seconds += 2 * sparse * cluster.sum_latency_s(layout.expert_ranks)
        return seconds / layout.pipeline

    @cached_property
    def _exchanged(self) -> float:
        return _exchanged_seconds(self.shape, self.cluster, self.layout)


def _exchanged_seconds(shape: ModelShape, cluster: Cluster, layout: EngineLayout) -> float:
    """Seconds in which a rank sends what others need of one token."""
    hidden, seconds = shape.hidden * layout.size, 0.0
    if layout.tensor > 1:
        sent = 2 * (layout.tensor - 1) / layout.tensor * hidden
        seconds = 2 * shape.layers * sent / cluster.gather_bytes_per_s(layout.tensor)
    if layout.copies > 1:
        sparse, ranks = len(shape.sparse_layers), layout.expert_ranks
        sent = 2 * shape.active_experts * hidden * (ranks - 1) / ranks / layout.tensor
        seconds += sparse * sent / cluster.exchange_bytes_per_s(ranks)
    return seconds / layout.pipeline
