"""A checksum of tensors that is computed where they are. Needs PyTorch alone: engines' processes load this file."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW_WORDS = 4096


def checksum(tensor: Tensor) -> int:
    """A number that changes if a byte of the tensor changes, or if its rows of 32 KiB change places.

    The bytes are read as 64-bit words (the last one filled up with zeros) in rows of 4096; the sum of row j counts
    2j + 1 times, the last word as a row of its own. All arithmetic is modulo 2^64, so the order of the additions
    does not matter, and a CPU and a GPU find the same.
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
