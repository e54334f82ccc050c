"""Read new weights in an engine's process and compute their checksums."""

from __future__ import annotations

import base64
import functools
import math
import os
import pickle
from collections.abc import Container, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

_Key = TypeVar("_Key")

TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"
"""Environment variable with a server's token: every user of the machine can read a command line."""
MACHINE_VARIABLE = "VERL_MACHINE"
"""Environment variable with the identity of the machine, for an engine that has several."""
SHARED_MEMORY = "/dev/shm"
ADAPTER_REPORT = "arrived"
"""Prefix of the files, in a folder of adapters, in which ranks report the adapters that they have read."""
ROW_WORDS = 4096
"""Words of a row of :func:`checksum`."""
_RECENT_SIZES = 256  # a model has few different sizes of tensors, so their factors are computed once
_DEVICE_ARGUMENT = 6
"""Place of ``storage_device`` among the arguments of ``rebuild_cuda_tensor``: a number by the sender's count."""
_CPU = torch.device("cpu")
_mapped: dict[tuple[int, int], Tensor] = {}
"""The newest file of weights that this process has mapped, by device and inode: a path may get another file."""


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of a GPU, which is the same in every process that sees it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


# ---- checksums


class Share(NamedTuple):
    """The weights of a part that one of an engine's processes verifies: on a machine all read the same memory."""

    rank: int
    """Index of the process among those of its machine, from 0."""
    ranks: int
    """Processes of the engine on a machine."""

    def has(self, index: int) -> bool:
        """Return whether the weight with this index in its part is one of them."""
        return index % self.ranks == self.rank


ALL = Share(0, 1)


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bytes in [0, 2^64), which detects changed bytes and swapped rows of 32 KiB.

    The bytes are read as 64-bit words in rows of 4096: Σ_j (2j + 1)·(sum of row j), plus an incomplete last word as a
    further row (filled up with zeros), plus the number of elements. Arithmetic modulo 2^64 does not depend on the order
    of additions, so a CPU and a GPU compute the same value.
    """
    return int(signed_checksum(tensor)) % 2**64


def with_checksums(
    weights: Iterable[tuple[str, Tensor]],
    checksums: dict[str, str],
    device: torch.device = _CPU,
    share: Share = ALL,
    full_layers: Container[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; at the end store in ``checksums`` those of this process's share.

    These are yielded on ``device``, where their checksum is computed, and so are weights of layers called as one of
    ``full_layers`` (see :func:`divided_by_columns`). Others are yielded where they are.
    """
    signed: dict[str, Tensor] = {}
    try:
        for index, (name, tensor) in enumerate(weights):
            if share.has(index) or name.rpartition(".")[0].rpartition(".")[2] in full_layers:
                tensor = tensor.to(device, non_blocking=True)
            if share.has(index):
                signed[name] = signed_checksum(tensor)
            yield name, tensor
    finally:
        checksums.update(as_text(signed))


def signed_checksum(tensor: Tensor) -> Tensor:
    """Return the checksum as an int64 on the tensor's device, so that a GPU need not be waited for."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    word_bytes = data.numel() // 8 * 8
    words = (
        data[:word_bytes].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:word_bytes].clone().view(torch.int64)
    )
    rows = words.numel() // ROW_WORDS
    sums = words[rows * ROW_WORDS :].sum() * (2 * rows + 1) + tensor.numel()
    if rows:
        sums += (words[: rows * ROW_WORDS].view(rows, ROW_WORDS).sum(-1) * _factors(rows, data.device)).sum()
    if word_bytes < data.numel():
        last = data.new_zeros(8)
        last[: data.numel() - word_bytes] = data[word_bytes:]
        sums += last.view(torch.int64).sum() * (2 * rows + 3)
    return sums


@functools.lru_cache(_RECENT_SIZES)
def _factors(rows: int, device: torch.device) -> Tensor:
    return 2 * torch.arange(rows, device=device) + 1


def as_text(signed: dict[_Key, Tensor]) -> dict[_Key, str]:
    """Return checksums in [0, 2^64) as text, because JSON readers may round integers of 64 bits."""
    if not signed:
        return {}
    values = torch.stack(list(signed.values())).tolist()  # one wait for a GPU, and not one for each tensor
    return {name: str(value % 2**64) for name, value in zip(signed, values, strict=True)}


# ---- weights


def part_memory(part: dict[str, Any], device: torch.device = _CPU) -> Tensor:
    """Return the bytes of a ``SharedPart``, given its description: where the trainer wrote them, not a copy.

    Each call returns a storage of its own, so that one can tell whether tensors of it are held.

    Args:
        part: ``tensors``, the ``size`` of the part in bytes, and where it lies: the ``path`` of a file, the ``paths``
            of files by machine, or the ``handle`` of memory on the device, a pickle of what
            ``torch.multiprocessing.reductions.reduce_tensor`` returned, as base64.
        device: of this process's part of the engine.
    """
    if "handle" in part:
        memory = _in_handle(part["handle"], device)
    else:
        path = part["paths"][os.environ[MACHINE_VARIABLE]] if "paths" in part else part["path"]
        memory = torch.from_numpy(_in_file(path))
    return memory[: part["size"]]


def weights_in_part(
    part: dict[str, Any], device: torch.device = _CPU, memory: Tensor | None = None
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the tensors of a ``SharedPart`` where they lie, so that no byte is read that the engine does not ask for.

    The writer may begin the next part when the iteration has ended, so whoever keeps a tensor copies it before.

    Args:
        part: see :func:`part_memory`.
        device: of this process's part of the engine.
        memory: what :func:`part_memory` returned of it; None asks for it.
    """
    memory = part_memory(part, device) if memory is None else memory
    for name, format_name, shape, start in part["tensors"]:
        dtype = getattr(torch, format_name)
        yield name, memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    del memory
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # everything is read


def divided_by_columns(model: nn.Module) -> set[str]:
    """Return the last names of the layers of whose weights each tensor-parallel rank takes some columns.

    They are no contiguous memory: to fetch them from the host takes a GPU longer than to fetch the whole weight.
    """
    layers = model.named_modules()
    return {name.rpartition(".")[2] for name, layer in layers if type(layer).__name__ == "RowParallelLinear"}


def _in_file(path: str) -> NDArray[np.uint8]:
    status = Path(path).stat()
    size, file = status.st_size, (status.st_dev, status.st_ino)
    memory = _mapped.get(file)
    if memory is None or len(memory) < size:
        # It stays mapped from update to update, because new pages cost more than a copy.
        for old in _mapped.values():
            unpin(old)
        _mapped.clear()
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        pin(memory, path)
        _mapped[file] = memory
    return memory.numpy()


def _in_handle(handle: str, device: torch.device) -> Tensor:
    # Opened again for each part: while it is open, the trainer cannot release its memory.
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    if rebuild is rebuild_cuda_tensor:
        arguments = (*arguments[:_DEVICE_ARGUMENT], device.index, *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild(*arguments)


# ---- pinned memory


def pin(memory: Tensor, path: str) -> None:
    """Pin mapped memory, so that GPUs copy to and from it directly, some five times as fast; nothing without CUDA.

    Files on a disk stay as they are: the kernel refuses to pin their pages.

    Raises:
        RuntimeError: CUDA refuses it.
    """
    if os.path.realpath(path).startswith(f"{SHARED_MEMORY}/") and memory.numel() and torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        assert runtime is not None
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Undo :func:`pin`; it must precede the end of the mapping."""
    if memory.numel() and memory.is_pinned():
        runtime = torch.cuda.cudart()
        assert runtime is not None
        torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


def weights_in_files(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files, loaded one at a time on the CPU."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
