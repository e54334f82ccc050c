"""Read new weights in an engine's process and compute their checksums."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor

TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"
"""Environment variable with a server's token: every user of the machine can read a command line."""
ADAPTER_REPORT = "arrived"
"""Beginning of the names of the files in a folder of adapters that tell what each rank has read of it."""
_ROW_WORDS = 4096
_DEVICE_ARGUMENT = 6
"""Place of ``storage_device`` among the arguments of ``rebuild_cuda_tensor``: a number by the sender's count."""
_CPU = torch.device("cpu")
_mapped: dict[tuple[int, int], Tensor] = {}
"""The newest file of weights that this process has mapped, by device and inode: a path may get another file."""


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of a GPU, which is the same in every process that sees it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


# ---- checksums


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bytes in [0, 2^64), which detects changed bytes and swapped rows of 32 KiB.

    The bytes are read as 64-bit words in rows of 4096: Σ_j (2j + 1)·(sum of row j), plus an incomplete last word as a
    further row (filled up with zeros), plus the number of elements. Arithmetic modulo 2^64 does not depend on the order
    of additions, so a CPU and a GPU compute the same value.
    """
    return int(signed_checksum(tensor)) % 2**64


def with_checksums(weights: Iterable[tuple[str, Tensor]], checksums: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights unchanged; at the end store each one's checksum in ``checksums``."""
    signed: dict[str, Tensor] = {}
    try:
        for name, tensor in weights:
            signed[name] = signed_checksum(tensor)
            yield name, tensor
    finally:
        checksums.update(as_text(signed))


def signed_checksum(tensor: Tensor) -> Tensor:
    """Return the checksum as an int64 on the tensor's device, so that a GPU need not be waited for."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:whole].clone().view(torch.int64)
    rows = words.numel() // _ROW_WORDS
    sums = words[rows * _ROW_WORDS :].sum() * (2 * rows + 1) + tensor.numel()
    if rows:
        factors = 2 * torch.arange(rows, device=data.device) + 1
        sums = sums + (words[: rows * _ROW_WORDS].view(rows, _ROW_WORDS).sum(-1) * factors).sum()
    if whole < data.numel():
        last = data.new_zeros(8)
        last[: data.numel() - whole] = data[whole:]
        sums = sums + last.view(torch.int64).sum() * (2 * rows + 3)
    return sums


def as_text(signed: dict[str, Tensor]) -> dict[str, str]:
    """Return checksums in [0, 2^64) as text, because JSON readers may round integers of 64 bits."""
    if not signed:
        return {}
    values = torch.stack(list(signed.values())).tolist()  # one wait for a GPU, and not one for each tensor
    return {name: str(value % 2**64) for name, value in zip(signed, values, strict=True)}


# ---- weights


def weights_in_part(
    part: dict[str, Any], device: torch.device = _CPU, keeps: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a ``SharedPart`` on this engine's device, given its description.

    The writer may begin the next part when the iteration has ended.

    Args:
        part: ``tensors``, the ``size`` of the part in bytes, and where it lies: the ``path`` of a file, or the
            ``handle`` of memory on the device, a pickle of what ``torch.multiprocessing.reductions.reduce_tensor``
            returned, as base64.
        device: of this process's part of the engine.
        keeps: whether the engine keeps some tensors after the iteration, so that they must be copies.
    """
    memory = _in_handle(part["handle"], device) if "handle" in part else _in_file(part["path"])
    if keeps and memory.device == device == _CPU:
        memory, keeps = _copies.of(memory[: part["size"]]), False
    for name, format_name, shape, start in part["tensors"]:
        dtype = getattr(torch, format_name)
        end = start + math.prod(shape) * dtype.itemsize
        yield name, memory[start:end].view(dtype).view(shape).to(device, copy=keeps, non_blocking=True)
    del memory
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # everything is read


def _in_file(path: str) -> Tensor:
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
    return memory


def _in_handle(handle: str, device: torch.device) -> Tensor:
    # It is opened for each part anew: as long as it is open, the trainer cannot give its memory back.
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    if rebuild is rebuild_cuda_tensor:
        arguments = (*arguments[:_DEVICE_ARGUMENT], device.index, *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild(*arguments)


class _Copies:
    """Copies of parts on a CPU, in memory that is used again as soon as nobody holds tensors in it.

    New memory for each tensor costs ten times as much as the copy: the kernel clears every page of it.
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._last: StorageWeakRef | None = None

    def of(self, memory: Tensor) -> Tensor:
        is_held = self._last is not None and not self._last.expired()
        if is_held or len(self._memory) < len(memory):
            self._memory = bytearray(len(memory))
        copy = torch.frombuffer(self._memory, dtype=torch.uint8, count=len(memory)).copy_(memory)
        self._last = StorageWeakRef(copy.untyped_storage())
        return copy


_copies = _Copies()


# ---- pinned memory


def pin(memory: Tensor, path: str) -> None:
    """Let GPUs copy to and from mapped memory directly, which is some five times as fast; nothing without CUDA.

    Files on a disk stay as they are: the kernel refuses to pin their pages.

    Raises:
        RuntimeError: CUDA refuses it.
    """
    if path.startswith("/dev/shm/") and memory.numel() and torch.cuda.is_available():
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
