"""verl's own environment variables: the only place that reads them.

=========================== ===================================================== =========
variable                    meaning                                               default
=========================== ===================================================== =========
VERL_LOGGING_LEVEL          level of verl's loggers                               WARNING
VERL_AUTO_PADDING           pad batches that do not divide among the ranks (1)    0
VERL_USE_EXTERNAL_MODULES   modules to import at start, comma-separated           none
VERL_FILE_LOGGER_PATH       file of the `file` tracker                            none
VERL_FILE_LOGGER_ROOT       its folder, where no path is given                    .
TENSORBOARD_DIR             folder of the `tensorboard` tracker                   tensorboard_log
=========================== ===================================================== =========
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from verl.errors import ConfigError
from verl.utils.fs import below

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def logging_level() -> int:
    """Level of verl's loggers, from ``VERL_LOGGING_LEVEL`` (a name such as INFO)."""
    name = os.environ.get("VERL_LOGGING_LEVEL", "WARNING").strip().upper()
    levels = logging.getLevelNamesMapping()
    if name not in levels:
        raise ConfigError(f"VERL_LOGGING_LEVEL='{name}' is no logging level. Use one of {', '.join(levels)}.")
    return levels[name]


def auto_padding() -> bool:
    """Whether batches are padded to a multiple of the ranks, from ``VERL_AUTO_PADDING``."""
    return _flag("VERL_AUTO_PADDING")


def external_modules() -> list[str]:
    """Modules to import at start (to register your own algorithms), from ``VERL_USE_EXTERNAL_MODULES``."""
    return [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name.strip()]


FILE_LOGGER_RUN = "VERL_FILE_LOGGER_RUN"
"""Variable with the id under which the ``file`` tracker goes on with a run; set from the checkpoint."""


def file_logger_path(project_name: str, experiment_name: str) -> Path:
    """File of the ``file`` tracker: ``VERL_FILE_LOGGER_PATH``, or ``<root>/<project>/<experiment>.jsonl``."""
    path = os.environ.get("VERL_FILE_LOGGER_PATH")
    if path:
        return Path(path).expanduser()
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return below(root, project_name, f"{experiment_name}.jsonl")


def tensorboard_dir() -> Path:
    """Folder of the ``tensorboard`` tracker, from ``TENSORBOARD_DIR``."""
    return Path(os.environ.get("TENSORBOARD_DIR", "tensorboard_log")).expanduser()


def secret(name: str, setting: str) -> str:
    """The value of the environment variable that a setting names, such as the key of a service.

    Raises:
        ConfigError: it is not set.
    """
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"{setting}={name}: there is no environment variable {name}. Export it where the run starts.")
    return value


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigError(f"{name}='{value}' is neither true nor false. Use 1 or 0.")
    return value in _TRUE
