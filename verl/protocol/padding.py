"""Rows added so that a batch divides over ranks, and their removal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from verl.errors import SchemaError

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto


class DataProtoConfig:
    """Settings of this process for all batches.

    ``auto_padding``: whether the dispatch of a worker call may pad any batch that does not divide
    over the ranks. Off, unless the environment has ``VERL_AUTO_PADDING=1``.
    """

    auto_padding: bool = os.environ.get("VERL_AUTO_PADDING", "0").lower() in ("1", "true")


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """``data`` with rows added at the end until ``size_divisor`` divides its length; how many were added.

    The rows added are its own, from the first on and round again, so that they are valid inputs. An
    empty batch stays empty. Undone by ``unpad_dataproto``.
    """
    if size_divisor < 1:
        raise SchemaError(f"a batch cannot be padded to a multiple of {size_divisor}; use a positive number.")
    length = len(data)
    pad_size = -length % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(length + pad_size) % length), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """``data`` without its last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise SchemaError(f"cannot remove {pad_size} rows of padding from a batch of {len(data)} rows.")
    return data.slice(end=len(data) - pad_size) if pad_size else data
