"""``rollout.engine_kwargs.<engine>``: the keys in it that verl reads itself, and what goes on to the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.utils.redact import is_secret
from verl.workers.rollout.server import Patience

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

PYTHON = "python"
"""Key that names the interpreter of the environment with the engine."""
START_TIMEOUT_S = "start_timeout_s"
"""Key for the longest start of the server in seconds."""
HANG_TIMEOUT_S = "hang_timeout_s"
"""Key for the longest time in seconds without an answered health check, or with a stopped process of the server."""
ANSWER_TIMEOUT_S = "answer_timeout_s"
"""Key for the longest time in seconds in which the server works and gives no answer."""
_OWN = (PYTHON, START_TIMEOUT_S, HANG_TIMEOUT_S, ANSWER_TIMEOUT_S)


def extra_arguments(config: RolloutConfig, decided: Iterable[str]) -> dict[str, Any]:
    """Further arguments of the engine called ``rollout.name``, as the user gave them; null means not given.

    Args:
        config: ``actor_rollout_ref.rollout``.
        decided: arguments that other settings decide.

    Raises:
        ConfigError: one of ``decided`` is given, or a secret.
    """
    extra = {name: value for name, value in _given(config).items() if name not in _OWN and value is not None}
    doubled = sorted(extra.keys() & set(decided))
    if doubled:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name} sets {', '.join(doubled)}, which other settings decide: see the "
            f"table of docs/rollout_engines.md. Take it out of engine_kwargs.{config.name}."
        )
    if found := [name for name, value in extra.items() if is_secret(name, value)]:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.{found[0]} is a secret, and would stand on the command line of the "
            "server, which everybody on the machine can read. Set it in the environment where the run starts "
            "(HF_TOKEN for the Hugging Face hub); the server has a token of its own."
        )
    return extra


def python_of(config: RolloutConfig) -> str:
    """The interpreter that runs the server: ``engine_kwargs.<engine>.python``, or this one.

    Raises:
        ConfigError: there is no such file.
    """
    python = _given(config).get(PYTHON)
    if python is None:
        return sys.executable
    path = Path(str(python)).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.python={python}: there is no such file. Give the python of the "
            f"environment in which {config.name} is installed, for example /opt/{config.name}/bin/python."
        )
    return str(path.absolute())  # not resolved: the link in an environment's folder is what makes it that environment


def start_timeout_s(config: RolloutConfig, default: float) -> float:
    """Longest start of the server: ``engine_kwargs.<engine>.start_timeout_s``.

    Raises:
        ConfigError: it is not a positive number.
    """
    return _seconds(config, START_TIMEOUT_S, default)


def patience(config: RolloutConfig) -> Patience:
    """How long the server may hang: ``hang_timeout_s`` and ``answer_timeout_s`` of ``engine_kwargs.<engine>``.

    Raises:
        ConfigError: one is not a positive number.
    """
    default = Patience()
    return Patience(
        _seconds(config, HANG_TIMEOUT_S, default.hang_s), _seconds(config, ANSWER_TIMEOUT_S, default.answer_s)
    )


def _seconds(config: RolloutConfig, name: str, default: float) -> float:
    value = _given(config).get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.{name}={value!r} must be a positive number of seconds; null takes "
            f"the default, {default:g}."
        )
    return float(value)


def _given(config: RolloutConfig) -> Mapping[str, Any]:
    return config.engine_kwargs.get(config.name) or {}
