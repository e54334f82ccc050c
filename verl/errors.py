"""All exception classes of verl.

Each also inherits the standard exceptions that it refines, so ``except ValueError`` still catches it, and so does the
``except AssertionError`` of code that was written for checks by ``assert``. A message states
what is wrong, the value found, the values allowed, and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class VerlError(Exception):
    """Base class of all errors of verl."""


class ConfigError(VerlError, ValueError, AssertionError):
    """The configuration is wrong; raised before any model loads, with all problems together."""


class SectionError(ConfigError, TypeError):
    """A section of the configuration was made with a wrong value or an unknown keyword.

    ``details`` holds one entry for each wrong value, in the form of pydantic's ``ValidationError.errors()``.
    """

    def __init__(self, message: str, details: Sequence[ErrorDetails] = ()) -> None:
        super().__init__(message)
        self.details = list(details)


class UnsupportedError(ConfigError, NotImplementedError):
    """A value is known elsewhere, or nowhere, and has no implementation here."""


class MissingFileError(ConfigError, FileNotFoundError):
    """A file that a setting names is not there."""

    __str__ = Exception.__str__  # that of OSError has other arguments


class MissingPluginError(ConfigError):
    """A command or setting needs a plug-in that is not installed."""


class MissingNameError(ConfigError, AttributeError):
    """A file or module that a setting names lacks a function or class."""


class UserCodeError(ConfigError, RuntimeError):
    """Code of the user's raised an error; the message has its line."""


class SchemaError(VerlError, ValueError, AssertionError):
    """A batch lacks a column, or a column has the wrong shape, dtype or length."""


class MissingColumnError(SchemaError, KeyError):
    """A batch has no column or entry of this name."""

    __str__ = Exception.__str__  # that of KeyError quotes the message


class NoSuchRowError(SchemaError, IndexError):
    """A batch has no row of this number."""


class DataError(VerlError, ValueError):
    """A data file is missing, unreadable, empty, or a row cannot be used."""


class RewardError(VerlError, RuntimeError):
    """Scoring failed more often than the configuration allows."""


class NonFiniteError(VerlError, FloatingPointError):
    """Losses or gradients were not finite, in more steps than the configuration allows."""


class RolloutError(VerlError, RuntimeError):
    """A rollout engine cannot serve a request or a model."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint cannot be written, or the files on disk cannot be resumed from."""


class ResourceError(VerlError, RuntimeError):
    """More processes or devices are requested than are available."""


class WorkerError(VerlError, RuntimeError):
    """A worker process failed or died; the message names the rank and the method."""


class ProcessLostError(WorkerError):
    """A process of the run died or does not answer; its state can be rebuilt and the run can continue."""


class EngineLostError(ProcessLostError, RolloutError):
    """The process of a rollout engine died or does not answer; the engine can be restarted."""


class PassTooLargeError(ProcessLostError):
    """A forward or backward pass of one rank ran out of memory while other ranks waited for it.

    The ranks can be restarted with passes of at most ``limit`` tokens for this ``kind``: ``train`` (with gradients) or
    ``infer`` (without).
    """

    def __init__(self, message: str, kind: str, limit: int) -> None:
        super().__init__(message, kind, limit)
        self.kind = kind
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])
