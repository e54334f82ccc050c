"""Read new weights in an engine's process and compute their checksums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"
"""Environment variable with a server's token: every user of the machine can read a command line."""
ADAPTER_REPORT = "arrived"
"""Beginning of the names of the files in a folder of adapters that tell what each rank has read of it."""
_ROW_WORDS = 4096
_mapped: dict[tuple[int, int], Tensor] = {}
"""The newest file of weights that this process has mapped, by device and inode: a path may get another file."""


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bytes in [0, 2^64), which detects changed bytes and swapped rows of 32 KiB.

    The bytes are read as 64-bit words in rows of 4096: Σ_j (2j + 1)·(sum of row j), plus an incomplete last word as a
    further row (filled up with zeros), plus the number of elements. Arithmetic modulo 2^64 does not depend on the order
    of additions, so a CPU and a GPU compute the same value.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:whole].clone().view(torch.int64)
    rows = words.numel() // _ROW_WORDS
    sums = [words[: rows * _ROW_WORDS].view(rows, _ROW_WORDS).sum(-1), words[rows * _ROW_WORDS :].sum().view(1)]
    row_sums = torch.cat(sums)
    total = int((row_sums * (2 * torch.arange(rows + 1, device=row_sums.device) + 1)).sum())
    rest = int.from_bytes(bytes(data[whole:].cpu().tolist()), "little")
    return (total + rest * (2 * rows + 3) + tensor.numel()) % 2**64


def with_checksums(weights: Iterable[tuple[str, Tensor]], found: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights unchanged, and store each one's checksum in ``found``."""
    for name, tensor in weights:
        found[name] = str(checksum(tensor))  # text, because JSON readers may round integers of 64 bits
        yield name, tensor


def weights_in_part(part: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a ``SharedPart``, given its description.

    They are copies, because an engine may keep some when the writer has begun the next part.
    """
    status = Path(part["path"]).stat()
    size, file = status.st_size, (status.st_dev, status.st_ino)
    memory = _mapped.get(file)
    if memory is None or len(memory) < size:
        # It stays mapped from update to update, because new pages cost more than a copy.
        memory = torch.from_file(part["path"], shared=True, size=size, dtype=torch.uint8)
        _mapped.clear()
        _mapped[file] = memory
    for name, format_name, shape, start in part["tensors"]:
        dtype = getattr(torch, format_name)
        end = start + math.prod(shape) * dtype.itemsize
        yield name, memory[start:end].view(dtype).view(shape).clone()


def weights_in_files(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files, loaded one at a time on the CPU."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
