"""The tracker contract: one destination of metrics."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.utils.registry import Registry

TRACKERS: Registry[type[Tracker]] = Registry("tracker")


class Tracker(ABC):
    """One destination of metrics, chosen by name in ``trainer.logger``.

    A subclass is filed with ``@TRACKERS.register(name)``, imports its package in ``__init__`` and
    may raise anything there; what it raises later is caught and counted by :class:`Tracking`.

    Args:
        project_name: ``trainer.project_name``.
        experiment_name: ``trainer.experiment_name``.
        config: the run's settings, nested, without secrets.
    """

    package: ClassVar[str | None] = None
    """Python package that it needs, as it is imported."""
    install: ClassVar[str] = ""
    """What pip calls that package, if not the same."""
    run_id: str | None = None
    """What its service calls this run, where a later process can go on with it; kept in the checkpoints."""

    @abstractmethod
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step. Values are int or float, and may be NaN."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:  # noqa: B027
        """Record a table of texts and numbers; a destination that cannot show one leaves this as it is."""

    def go_on_after(self, step: int) -> None:  # noqa: B027
        """The run was resumed after ``step``: what is there of later steps will be recorded again."""

    @classmethod
    def variables_of_run(cls, run_id: str) -> Mapping[str, str]:
        """Environment variables with which its package goes on with a run instead of making one."""
        return {}

    def finish(self) -> None:  # noqa: B027
        """Nothing more will come: write what is buffered."""

    @classmethod
    def require(cls) -> None:
        """Make sure that its package is there.

        Raises:
            ConfigError: it is not; the message says how to get it.
        """
        if cls.package is not None:
            import_package(cls.package, cls.install or cls.package)


def import_package(package: str, install: str) -> ModuleType:
    """Import a tracker's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the package is there; something that it imports is not
        raise ConfigError(
            f"a tracker of trainer.logger needs the package '{package}', which is not installed. "
            f"Run `pip install {install}`, or take the tracker out: trainer.logger='[console]'."
        ) from error


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: ``{"a": {"b": 1}}`` → ``{"a.b": 1}``; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown; line breaks and bars inside cells are kept readable."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])
