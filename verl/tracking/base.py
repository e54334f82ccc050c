"""The base class of trackers, their registry, and helpers to implement them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from verl.base.import_utils import is_about
from verl.base.registry import Registry
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.utils.token_page import TokenPage

TRACKERS: Registry[type[Tracker]] = Registry("tracker")


class Tracker(ABC):
    """A destination of metrics, selected by name in ``trainer.logger``.

    A subclass is registered with ``@TRACKERS.register(name)`` and imports its package in ``__init__``. Exceptions in
    ``__init__`` end the run if the cause is not an unreachable server; :class:`Tracking` suppresses later ones.
    ``config`` are the run's nested settings without secrets.
    """

    package: ClassVar[str | None] = None
    """Import name of the required package, if any."""
    install: ClassVar[str] = ""
    """Name of that package for pip, if different."""
    run_id: str | None = None
    """The service's id of this run, if a later process can continue it; saved in checkpoints."""

    @abstractmethod
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None: ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step; values may be NaN or infinite."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:  # noqa: B027
        """Record a table of texts and numbers; does nothing by default."""

    def log_page(self, name: str, page: TokenPage, step: int) -> None:  # noqa: B027
        """Keep a page of tokens, as HTML or as Markdown; does nothing by default."""

    def log_checkpoint(self, step: int, folder: Path) -> None:  # noqa: B027
        """Keep a copy of the checkpoint of a step, ``folder``; does nothing by default."""

    def log_event(self, event: str, details: Mapping[str, object]) -> None:  # noqa: B027
        """Record what happened to the run: ``checkpoint`` (step, folder), ``end`` (status); does nothing by default."""

    def log_alert(self, step: int, rule: str, reason: str) -> None:  # noqa: B027
        """Show that a rule of :mod:`verl.trainer.health` found a sign of trouble; does nothing by default."""

    def go_on_after(self, step: int) -> None:  # noqa: B027
        """Drop the records of later steps if possible; called when the run was resumed after ``step``."""

    @classmethod
    def variables_of_run(cls, run_id: str) -> Mapping[str, str]:
        """Return environment variables with which the tracker continues a run instead of creating one."""
        return {}

    def finish(self) -> None:  # noqa: B027
        """Write buffered records and close the tracker."""

    @classmethod
    def require(cls) -> None:
        """Check that the tracker's package is installed; otherwise a ConfigError says how to install it."""
        if cls.package is not None:
            import_package(cls.package, cls.install or cls.package)


def import_package(package: str, install: str) -> ModuleType:
    """Import a tracker's package; a ConfigError says how to install it if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if not is_about(error, package):
            raise
        raise ConfigError(
            f"a tracker needs the package '{package}', which is not installed. "
            f"Run `pip install {install}`, or take the tracker out (logger='[console]')."
        ) from error


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested settings to dotted names: ``{"a": {"b": 1}}`` → ``{"a.b": 1}``; lists are kept."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table as Markdown; escapes line breaks and bars in cells."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])
