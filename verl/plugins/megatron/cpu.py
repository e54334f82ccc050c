"""Replacement of the parts of CUDA that megatron-core calls, so that it runs on CPUs over gloo.

megatron-core writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its source. :func:`install` gives its
modules, and no others, a ``torch`` whose ``cuda`` is the CPU. PyTorch itself stays as it is. What is replaced:

- ``torch.cuda.current_device``, ``set_device``, ``synchronize``: the CPU, and nothing to wait for;
- ``torch.cuda.manual_seed``, ``get_rng_state``, ``set_rng_state``: the CPU's random state, also in the tracker of
  random states of tensor-parallel ranks;
- ``torch.cuda.Stream``, ``current_stream``, ``stream``: one stream, in which all is done when the next line runs;
- ``device="cuda"`` of ``torch.zeros``, ``empty`` and ``tensor``: the CPU;
- ``torch.distributed.all_gather`` and ``reduce_scatter`` of lists: gloo takes parts of equal lengths only;
- the copy of numbers of tokens to the CPU, which experts make before they exchange tokens: they are there already.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from verl.plugins.megatron import library

_CPU = torch.device("cpu")


class _Stream:
    """A stream of work that is always done."""

    def wait_stream(self, stream: _Stream) -> None:
        """Do nothing."""

    def record_event(self) -> _Stream:
        """Return this stream as the event, because :meth:`synchronize` is all that is asked of it."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


class _Cuda(ModuleType):
    """``torch.cuda``, with the CPU as its only device."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def set_device(device: object) -> None:
        """Do nothing: there is one device."""

    @staticmethod
    def synchronize(device: object = None) -> None:
        """Do nothing: the CPU computes in order."""

    Stream = _Stream

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def stream(stream: _Stream) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _Distributed(ModuleType):
    """``torch.distributed``, where parts of different lengths are exchanged too, which gloo refuses."""

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    @staticmethod
    def all_gather(outputs: list[Tensor], part: Tensor, group: dist.ProcessGroup | None = None) -> None:
        if len({len(output) for output in outputs}) == 1:
            dist.all_gather(outputs, part, group=group)
            return
        padded = part.new_zeros(max(len(output) for output in outputs), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in outputs]
        dist.all_gather(parts, padded, group=group)
        for output, padded_output in zip(outputs, parts, strict=True):
            output.copy_(padded_output[: len(output)])

    @staticmethod
    def reduce_scatter(output: Tensor, parts: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        output.copy_(total.split([len(part) for part in parts])[dist.get_rank(group)])


class _Torch(ModuleType):
    """``torch`` whose factories take ``device="cuda"`` for the CPU."""

    cuda = _Cuda("torch.cuda")
    distributed = _Distributed("torch.distributed")

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _factory(name: str) -> object:
    original = getattr(torch, name)

    @wraps(original)
    def make(*args: object, **options: object) -> Tensor:
        if options.get("device") == "cuda":
            options["device"] = _CPU
        return original(*args, **options)

    return staticmethod(make)


for _name in ("zeros", "empty", "tensor"):
    setattr(_Torch, _name, _factory(_name))


def install() -> None:
    """Replace ``torch`` in all loaded modules of megatron-core; calling it again changes nothing."""
    replaced = _Torch("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = replaced  # type: ignore[attr-defined]
    states = library.tensor_parallel.random
    states._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    states._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    library.token_dispatcher.maybe_move_tensor_to_cpu = _counts_on_cpu


def _counts_on_cpu(counts: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return counts.numpy() if as_numpy and isinstance(counts, Tensor) else counts
