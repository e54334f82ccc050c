"""CUDA graphs of decoding passes: a pass is recorded once for a number of rows, and then replayed by one call.

A pass of a small model is hundreds of kernels, and the host takes longer to launch them than the GPU to compute. A
recorded pass has fixed shapes and addresses: tokens and positions are copied into buffers, and rows are filled up to
the next size. Attention that does not read each row up to its own length reads all keys up to the next bound.

Memory: all passes share what they need while they run, and write their logits into one buffer. At most
:data:`~verl.config.rollout.MAX_GRAPHS` are kept, those that were used last.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from verl.config.rollout import MAX_GRAPHS
from verl.workers.rollout.native.memory import CopiedPromptMemory, TokenPlaces

logger = logging.getLogger(__name__)

Logits = Callable[[Tensor, Tensor, TokenPlaces, CopiedPromptMemory], Tensor]
"""A pass: (rows,) tokens, (rows,) rotary offsets, their places and the memory, to (rows, vocab) logits."""

_TOKENS_STEP = 256
"""Lengths are rounded up to a multiple of it, so that few graphs serve all lengths."""
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
        self._passes: OrderedDict[tuple[int, int], _Pass] = OrderedDict()
        self._recorder: _Recorder | None = None
        self.records = True
        """True if passes are recorded; False computes them one by one, in the same shapes."""

    def forget(self) -> None:
        """Drop all graphs: they hold addresses of weights, keys and values."""
        self._passes.clear()
        self._recorder = self._memory = None

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
        decode_pass = self._pass(memory, min(rows, memory.room))
        decode_pass.take(tokens, memory)
        if self.records and decode_pass.output is None and decode_pass.uses >= _RECORDED_AT:
            self._record(decode_pass, memory)
        return decode_pass.run()[: len(tokens)].clone()  # the next pass writes to the same memory

    @property
    def recorded(self) -> int:
        """Number of passes that are recorded."""
        return sum(decode_pass.output is not None for decode_pass in self._passes.values())

    def _pass(self, memory: CopiedPromptMemory, rows: int) -> _Pass:
        """Return the pass of this size over the tokens that are in memory now."""
        room = memory.text_room
        size = rows, room if memory.reads_each_row else tokens_of_graph(memory.bound, room)
        if size not in self._passes:
            if len(self._passes) == MAX_GRAPHS:
                self._passes.popitem(last=False)
            self._passes[size] = _Pass(self._logits, memory, *size)
        self._passes.move_to_end(size)
        return self._passes[size]

    def _record(self, decode_pass: _Pass, memory: CopiedPromptMemory) -> None:
        if self._recorder is None:
            logits = decode_pass.compute()
            self._recorder = _Recorder(logits.new_empty(min(memory.room, self._sizes[-1]), logits.shape[1]))
        try:
            self._recorder.record(decode_pass)
        except RuntimeError as error:  # the model's code waits for the device, as some mixtures of experts do
            self.records = False
            logger.warning(
                "native engine: this model's decoding cannot be recorded as a CUDA graph (%s), so each kernel is "
                "launched from Python, which is several times slower. Set rollout.name=vllm or sglang, or "
                "rollout.enforce_eager=true, which does not try it.",
                str(error).splitlines()[0],
            )


class _Pass:
    """A decoding pass of fixed size: ``rows`` rows, of which the last may be unused, and ``bound`` tokens."""

    def __init__(self, logits: Logits, memory: CopiedPromptMemory, rows: int, bound: int) -> None:
        self._logits, self._memory, self.rows, self._bound = logits, weakref.ref(memory), rows, bound
        # Unused rows write to the first token of slots that are free, and attend to it alone.
        self._tokens, self._positions, self._offsets = torch.zeros(
            3, rows, dtype=torch.long, device=memory.shape.device
        ).unbind()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None
        """Buffer into which the recorded pass writes its logits; None before it is recorded."""
        self.uses = 0

    def take(self, tokens: Tensor, memory: CopiedPromptMemory) -> None:
        """Copy the newest token of each row, and its place."""
        self.uses += 1
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = memory.positions
        self._positions[count:] = 0
        self._offsets[:count] = memory.offsets

    def run(self) -> Tensor:
        """Return the logits."""
        if self.output is None:
            return self.compute()
        if self.graph is None:
            return self.output.copy_(self.compute())
        self.graph.replay()
        return self.output

    def compute(self) -> Tensor:
        """Compute the logits kernel by kernel."""
        memory = self._memory()
        assert memory is not None
        return self._logits(self._tokens, self._offsets, TokenPlaces(self._positions, self._bound), memory)


class _Recorder:
    """Resources that the graphs of one memory share: a stream, memory of intermediate results, and a buffer of logits.

    Args:
        logits: (rows of the largest pass, vocab), on the device of the passes.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        on_gpu = logits.device.type == "cuda"
        self._stream = torch.cuda.Stream(logits.device) if on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None

    def record(self, decode_pass: _Pass) -> None:
        """Record the pass.

        Raises:
            RuntimeError: its code waits for the device, or does something else that a graph cannot hold.
        """
        output = self._logits[: decode_pass.rows]  # graphs run one after the other
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream), _usable_random_numbers(self._stream.device):
                decode_pass.compute()  # libraries allocate their workspaces before the recording
                # Other threads of this process may use the device meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    output.copy_(decode_pass.compute())
            torch.cuda.current_stream().wait_stream(self._stream)
            decode_pass.graph = graph
        decode_pass.output = output


@contextmanager
def _usable_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the device's random state if the recording inside fails, after which it would refuse to draw."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    before = generator.get_state()
    try:
        yield
    except RuntimeError:
        restored = torch.Generator(device)
        restored.set_state(before)
        generator.graphsafe_set_state(restored)
        raise
