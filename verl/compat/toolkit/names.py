"""Names that scripts compare: number formats, and paddings of supervised data."""

from __future__ import annotations

from enum import Enum

import torch

from verl.utils.model import torch_dtype

_NAMES: dict[torch.dtype, list[str | int]] = {
    torch.float16: ["16", "fp16", "half", "float16"],
    torch.float32: ["32", "fp32", "float", "float32"],
    torch.bfloat16: ["bf16", "bfloat16"],
}

Precision = str | int | torch.dtype


class PrecisionType:
    """The formats fp16, fp32 and bf16, each under several names (``fp16``, ``half``, ``16`` ...)."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"
    MIXED = "mixed"

    @staticmethod
    def supported_type(precision: Precision) -> bool:
        """Return whether ``precision`` names one of the formats."""
        return str(precision) in PrecisionType.supported_types() or precision in _NAMES

    @staticmethod
    def supported_types() -> list[str]:
        """All names of formats."""
        return [str(name) for names in _NAMES.values() for name in names]

    @staticmethod
    def is_fp16(precision: Precision) -> bool:
        """Return whether it is fp16."""
        return _is(precision, torch.float16)

    @staticmethod
    def is_fp32(precision: Precision) -> bool:
        """Return whether it is fp32."""
        return _is(precision, torch.float32)

    @staticmethod
    def is_bf16(precision: Precision) -> bool:
        """Return whether it is bf16."""
        return _is(precision, torch.bfloat16)

    @staticmethod
    def to_dtype(precision: Precision) -> torch.dtype:
        """Return PyTorch's dtype.

        Raises:
            ConfigError: the name is unknown.
        """
        matched = next((dtype for dtype in _NAMES if _is(precision, dtype)), None)
        return torch_dtype(str(precision)) if matched is None else matched

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """Return the short name: ``fp16``, ``fp32`` or ``bf16``."""
        return {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}[PrecisionType.to_dtype(precision)]


def _is(precision: Precision, dtype: torch.dtype) -> bool:
    return precision == dtype or str(precision) in _NAMES[dtype]


class DatasetPadMode(str, Enum):  # noqa: UP042 (its members print as scripts compare them)
    """Padding of a row: none, on the right, or prompts on the left and responses on the right."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    NO_PADDING = "no_padding"
