"""CUDA graphs of decoding passes: a pass is recorded once for a number of rows, and then replayed by one call.

A pass of a small model is a thousand kernels, and the host takes longer to launch them than the GPU to compute. A
recorded pass has fixed shapes and addresses: tokens and positions are copied into buffers, rows are filled up to the
next size, and attention reads all keys up to the next bound.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.native.memory import CopiedPromptMemory, TokenPlaces

logger = logging.getLogger(__name__)

Logits = Callable[[Tensor, Tensor, TokenPlaces, CopiedPromptMemory], Tensor]
"""A pass: (rows,) tokens, (rows,) rotary offsets, their places and the memory, to (rows, vocab) logits."""

_TOKENS_STEP = 256
_RECORDED_AT = 2
"""Use at which a pass is recorded: to record costs about as much as three passes."""


def tokens_of_graph(tokens: int, room: int) -> int:
    """Return the number of tokens that a graph attends to: the next multiple of 256, at most ``room``."""
    return min(room, -(-tokens // _TOKENS_STEP) * _TOKENS_STEP)


class DecodeGraphs:
    """Recorded decoding passes over one memory; another memory drops them.

    Args:
        logits: the pass.
        sizes: numbers of rows for which passes are recorded.

    On a CPU passes have the same shapes and buffers, and are computed.
    """

    def __init__(self, logits: Logits, sizes: Sequence[int]) -> None:
        self._logits, self._sizes = logits, sorted(sizes)
        self._memory: weakref.ref[CopiedPromptMemory] | None = None
        self._graphs: dict[tuple[int, int], _Pass] = {}
        self._pool: object = None
        self.records = True
        """Whether passes are recorded; False computes them one by one, in the same shapes."""

    def forget(self) -> None:
        """Drop all graphs: they hold addresses of weights, keys and values."""
        self._graphs.clear()
        self._pool = None

    def __call__(self, memory: CopiedPromptMemory, tokens: Tensor) -> Tensor:
        """Append one token to each running row; return (rows, vocab) logits.

        More rows than the largest size are computed without a graph.
        """
        if self._memory is None or self._memory() is not memory:
            self.forget()
            self._memory = weakref.ref(memory)
        rows = next((size for size in self._sizes if size >= len(tokens)), None)
        if rows is None:
            return self._logits(tokens, memory.offsets, memory.places, memory)
        size = min(rows, memory.room), tokens_of_graph(memory.bound, memory.text_room)
        if size not in self._graphs:
            self._graphs[size] = _Pass(self._logits, memory, *size)
        decode_pass = self._graphs[size]
        decode_pass.take(tokens, memory)
        if self.records and not decode_pass.is_recorded and decode_pass.uses >= _RECORDED_AT:
            self._record(decode_pass)
        return decode_pass.run()[: len(tokens)].clone()  # the next pass writes to the same memory

    @property
    def recorded(self) -> int:
        """Number of passes that are recorded."""
        return sum(decode_pass.is_recorded for decode_pass in self._graphs.values())

    def _record(self, decode_pass: _Pass) -> None:
        try:
            self._pool = decode_pass.record(self._pool)
        except RuntimeError as error:  # the model's code waits for the device, as some mixtures of experts do
            self.records = False
            logger.warning(
                "native engine: this model's decoding cannot be recorded as a CUDA graph (%s), so each kernel is "
                "launched from Python, which is several times slower. Set rollout.name=vllm or sglang, or leave "
                "rollout.cudagraph_capture_sizes out.",
                str(error).splitlines()[0],
            )


class _Pass:
    """A decoding pass of fixed size: ``rows`` rows, of which the last may be unused, and ``bound`` tokens."""

    def __init__(self, logits: Logits, memory: CopiedPromptMemory, rows: int, bound: int) -> None:
        self._logits, self._memory, self._bound = logits, weakref.ref(memory), bound
        # Unused rows write to the first token of slots that are free, and attend to it alone.
        self._tokens, self._positions, self._offsets = torch.zeros(
            3, rows, dtype=torch.long, device=memory.shape.device
        ).unbind()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None
        self.uses = 0

    @property
    def is_recorded(self) -> bool:
        """Whether :meth:`record` has been called."""
        return self._output is not None

    def take(self, tokens: Tensor, memory: CopiedPromptMemory) -> None:
        """Copy the newest token of each row, and its place."""
        self.uses += 1
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = memory.positions
        self._positions[count:] = 0
        self._offsets[:count] = memory.offsets

    def record(self, pool: Any) -> object:
        """Record the pass; return the pool of graphs' memory, which later ones share."""
        if self._tokens.device.type != "cuda":
            self._output = self._compute()
            return None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces before the recording
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._output = self._compute()
        self._graph = graph
        return graph.pool()

    def run(self) -> Tensor:
        """Compute the logits."""
        if self._output is None:
            return self._compute()
        if self._graph is None:
            return self._output.copy_(self._compute())
        self._graph.replay()
        return self._output

    def _compute(self) -> Tensor:
        memory = self._memory()
        assert memory is not None
        return self._logits(self._tokens, self._offsets, TokenPlaces(self._positions, self._bound), memory)
