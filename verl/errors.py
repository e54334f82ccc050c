"""Every error that verl raises on purpose.

One root, one class per thing that can be wrong; each also is the standard exception that it
refines, so ``except ValueError`` still catches it. A message says what is wrong, the value that
was found, the values that are allowed, and what to change.
"""

from __future__ import annotations


class VerlError(Exception):
    """Root of all errors that verl raises on purpose."""


class ConfigError(VerlError, ValueError):
    """The configuration is wrong; raised before any model loads, with all problems together."""


class SchemaError(VerlError, ValueError):
    """A batch lacks a column, or a column has the wrong shape, dtype or length."""


class DataError(VerlError, ValueError):
    """A data file is missing, unreadable, empty, or a row cannot be used."""


class RewardError(VerlError, RuntimeError):
    """Scoring failed more often than the configuration allows."""


class NonFiniteError(VerlError, FloatingPointError):
    """Losses or gradients were not finite, in more steps than the configuration allows."""


class RolloutError(VerlError, RuntimeError):
    """A rollout engine cannot serve a request or a model."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint cannot be written, or what lies on disk cannot be resumed from."""


class ResourceError(VerlError, RuntimeError):
    """More processes or devices are asked for than there are."""


class WorkerError(VerlError, RuntimeError):
    """A worker process failed or died; the message names the rank and the method."""


class ProcessLostError(WorkerError):
    """A process of the run died or no longer answers; what it held can be rebuilt, and the run can go on."""


class EngineLostError(ProcessLostError, RolloutError):
    """A rollout engine's own process died or no longer answers; another one can take its place."""


class PassTooLargeError(ProcessLostError):
    """A pass of one rank did not fit its memory while others waited for it; all can start again, with smaller ones.

    Args:
        message: what a person reads.
        kind: ``train`` or ``infer``: passes with gradients, or without.
        limit: tokens that a pass of this kind should have at most.
    """

    def __init__(self, message: str, kind: str, limit: int) -> None:
        super().__init__(message, kind, limit)
        self.kind = kind
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])
