"""verl's own environment variables: the only place that reads them.

=========================== ===================================================== =========
variable                    meaning                                               default
=========================== ===================================================== =========
VERL_SEED                   ``trainer.seed``, unless that is set                  1
VERL_FULL_DETERMINISM       ``full_determinism`` of every model, unless set (1)   0
VERL_LOGGING_LEVEL          level of verl's loggers                               WARNING
VERL_AUTO_PADDING           pad batches that do not divide among the ranks (1)    0
VERL_USE_EXTERNAL_MODULES   modules to import at start, comma-separated           none
VERL_USE_EXTERNAL_PLUGINS   plugins (entry points of ``verl.plugins``) to start   none
VERL_USE_MODELSCOPE         refused: models come from a folder or Hugging Face    0
VERL_DATAPROTO_             numpy or torch: both are accepted, and batches
SERIALIZATION_METHOD        travel as flat buffers whatever it says               numpy
VERL_FILE_LOGGER_PATH       file of the `file` tracker                            none
VERL_FILE_LOGGER_ROOT       its folder, where no path is given                    .
TINKER_API_KEY              key that clients of `verl serve` send            a random one
TENSORBOARD_DIR             folder of the `tensorboard` tracker                   tensorboard_log
RANK                        number of this process, set by torchrun               0
MLP_... and SAGEMAKER_...   when a rented machine expires                         never
=========================== ===================================================== =========
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.base.fs import below
from verl.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def logging_level() -> int:
    """Level of verl's loggers, from ``VERL_LOGGING_LEVEL`` (a name such as INFO)."""
    name = os.environ.get("VERL_LOGGING_LEVEL", "WARNING").strip().upper()
    levels = logging.getLevelNamesMapping()
    if name not in levels:
        raise ConfigError(f"VERL_LOGGING_LEVEL='{name}' is no logging level. Use one of {', '.join(levels)}.")
    return levels[name]


def rank() -> int:
    """Number of this process among those of a launcher such as torchrun, from ``RANK``; 0 without one."""
    return int(os.environ.get("RANK", "0"))


LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
"""Variables by which torchrun describes the rank of a process and how ranks meet."""


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide :data:`LAUNCHER_VARIABLES` in the block, from processes that torchrun did not start.

    Ranks of a worker group that inherit ``TORCHELASTIC_USE_AGENT_STORE`` would wait for ever for torchrun's store.
    """
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def tinker_api_key() -> str | None:
    """Key that clients of ``verl serve`` send, from ``TINKER_API_KEY``; None if it is not set."""
    return os.environ.get("TINKER_API_KEY") or None


_EXPIRY = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def capacity_expires_at() -> float | None:
    """Return when this rented machine (Volcano Engine, SageMaker) expires, in seconds since 1970; None if never.

    Read from ``MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP`` or its ``SAGEMAKER_`` counterpart.
    """
    name = next((name for name in _EXPIRY if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    try:
        return float(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name}='{os.environ[name]}' is no number of seconds since 1970.") from None


def auto_padding() -> bool:
    """Return whether batches are padded to a multiple of the ranks, from ``VERL_AUTO_PADDING``."""
    return _flag("VERL_AUTO_PADDING")


def external_modules() -> list[str]:
    """Modules to import at start (to register your own algorithms), from ``VERL_USE_EXTERNAL_MODULES``."""
    return [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name.strip()]


def external_plugins() -> list[str]:
    """Names of the installed plugins to start, from ``VERL_USE_EXTERNAL_PLUGINS``."""
    return [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").split(",") if name.strip()]


def seed() -> int | None:
    """Seed of a run whose configuration sets none, from ``VERL_SEED``."""
    value = os.environ.get("VERL_SEED", "").strip()
    if value and not value.isdecimal():
        raise ConfigError(f"VERL_SEED='{value}' is no seed. Use an integer >= 0, or unset it.")
    return int(value) if value else None


def full_determinism() -> bool:
    """Return whether ``VERL_FULL_DETERMINISM`` allows deterministic kernels only; the configuration goes first."""
    return _flag("VERL_FULL_DETERMINISM")


def refuse_unusable() -> None:
    """Check the variables that nothing reads.

    Raises:
        ConfigError: one asks for something that this version cannot do.
    """
    if _flag("VERL_USE_MODELSCOPE"):
        raise ConfigError(
            "VERL_USE_MODELSCOPE=1: models of ModelScope are not in this version. Download the model (modelscope "
            "download --model NAME --local_dir FOLDER), name the folder as the path of the model, and unset it."
        )
    method = os.environ.get("VERL_DATAPROTO_SERIALIZATION_METHOD", "numpy")
    if method not in ("numpy", "torch"):
        raise ConfigError(f"VERL_DATAPROTO_SERIALIZATION_METHOD='{method}' is not known. Use numpy or torch.")


FILE_LOGGER_RUN = "VERL_FILE_LOGGER_RUN"
"""Variable with the id under which the ``file`` tracker goes on with a run; set from the checkpoint."""


def file_logger_path(project_name: str, experiment_name: str) -> Path:
    """File of the ``file`` tracker: ``VERL_FILE_LOGGER_PATH``, or ``<root>/<project>/<experiment>.jsonl``."""
    path = os.environ.get("VERL_FILE_LOGGER_PATH")
    if path:
        return Path(path).expanduser()
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return below(root, project_name, f"{experiment_name}.jsonl")


@contextmanager
def file_logger_at(path: Path) -> Iterator[None]:
    """Let the ``file`` tracker write to ``path`` in the block, as a run of its own that goes on with no earlier one."""
    names = ("VERL_FILE_LOGGER_PATH", FILE_LOGGER_RUN)
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["VERL_FILE_LOGGER_PATH"] = str(path)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


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


def with_variables(further: Mapping[str, str]) -> dict[str, str]:
    """Environment of a program: that of this process, with further variables."""
    return {**os.environ, **further}


def hosts_without_proxy() -> str:
    """Hosts that are reached without a proxy, from ``NO_PROXY``."""
    return os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigError(f"{name}='{value}' is neither true nor false. Use 1 or 0.")
    return value in _TRUE
