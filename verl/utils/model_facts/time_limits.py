"""Time limits that follow from the size of a model's files, for the slowest disk that a run is expected to have."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.model_facts.model_files import model_folder, weight_bytes

DISK_BYTES_PER_S = 2e8
"""Speed of the slowest disk that is expected: a network disk that several nodes share."""
COLLECTIVE_S, CALL_S = 600, 1800.0
"""Limits of small models."""
START_S = {"vllm": 600.0, "sglang": 900.0}
"""Longest start of an engine with a small model."""


@dataclass(frozen=True)
class TimeLimits:
    """Limits, in seconds, of what waits while a model is read or written."""

    file_bytes: int
    """Bytes of the model's weights in its files."""

    @property
    def read_s(self) -> float:
        """Time in which the slowest disk reads the weights once."""
        return self.file_bytes / DISK_BYTES_PER_S

    @property
    def collective_s(self) -> int:
        """Longest collective: other ranks wait in one while a rank reads the model or writes a copy of it."""
        return max(COLLECTIVE_S, round(5 * self.read_s))

    @property
    def call_s(self) -> float:
        """Longest call of a worker: it may write a checkpoint, six times the weights in bf16, or read several models
        and start an engine.
        """
        return max(CALL_S, float(round(10 * self.read_s)))

    def start_s(self, engine: str) -> float:
        """Longest start of an engine, one of :data:`START_S`, which reads the weights, too."""
        return max(START_S[engine], float(round(3 * self.read_s)))


def time_limits(model: object) -> TimeLimits:
    """Return the limits of a model in a folder or in the cache of the Hugging Face hub; of a small one if in neither.

    Args:
        model: the setting ``model.path``.
    """
    return TimeLimits(weight_bytes(model_folder(model)) if isinstance(model, str) and model else 0)
