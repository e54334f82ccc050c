"""Parse ``rollout.engine_kwargs.<engine>``: keys that verl reads itself, and arguments passed on to the engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base.engine_python import engine_python
from verl.base.redact import is_secret
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError
from verl.workers.rollout.engine_process import HangLimits

if TYPE_CHECKING:
    from verl.base.types import JsonObject

PYTHON = "python"
"""Key: Python interpreter of the environment that has the engine installed."""
START_TIMEOUT_S = "start_timeout_s"
"""Key: longest start of the server, in seconds."""
HANG_TIMEOUT_S = "hang_timeout_s"
"""Key: longest time without an answered health check, or with a stopped process of the server, in seconds."""
ANSWER_TIMEOUT_S = "answer_timeout_s"
"""Key: longest time with running requests and no answer to any of them, in seconds."""
_VERL_KEYS = (PYTHON, START_TIMEOUT_S, HANG_TIMEOUT_S, ANSWER_TIMEOUT_S)


@dataclass(frozen=True)
class Launch:
    """Interpreter and time limits of a vLLM or SGLang engine."""

    python: str = sys.executable
    """Interpreter of the environment that has the engine installed."""
    start_timeout_s: float = 600.0
    """Longest start, including the loading of the model."""
    hang_limits: HangLimits = field(default_factory=HangLimits)


def extra_arguments(config: RolloutConfig, decided: Iterable[str]) -> dict[str, object]:
    """Engine arguments that the user gave for ``rollout.name``, without those that are null.

    Raises:
        ConfigError: the user gave a secret, or one of ``decided``, the arguments that other settings determine.
    """
    extra = {
        name: value for name, value in _user_arguments(config).items() if name not in _VERL_KEYS and value is not None
    }
    doubled = sorted(extra.keys() & set(decided))
    if doubled:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name} sets {', '.join(doubled)}, which other settings decide: see the "
            f"table of docs/rollout_engines.md. Take it out of engine_kwargs.{config.name}."
        )
    if secrets := [name for name, value in extra.items() if is_secret(name, value)]:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.{secrets[0]} is a secret, and would appear on the command line of "
            "the server, which everybody on the machine can read. Set it in the environment in which the run "
            "starts (HF_TOKEN for the Hugging Face hub); the server has its own token."
        )
    return extra


def launch_settings(config: RolloutConfig, start_timeout_s: float) -> Launch:
    """Read the launch settings of ``rollout.name``; ``start_timeout_s`` is the default of the start's time limit.

    Raises:
        ConfigError: ``python`` is not a file, or a time is not a positive number.
    """
    default = HangLimits()
    return Launch(
        _python(config),
        _seconds(config, START_TIMEOUT_S, start_timeout_s),
        HangLimits(
            _seconds(config, HANG_TIMEOUT_S, default.hang_s), _seconds(config, ANSWER_TIMEOUT_S, default.answer_s)
        ),
    )


def applies_adapters(config: RolloutConfig, model_config: HFModelConfig) -> bool:
    """Return whether the engine is given LoRA adapters apart from the weights."""
    return model_config.has_adapters and not config.merge_adapters


def are_linear(model_config: HFModelConfig) -> bool:
    """Return whether all adapters are plain LoRA of linear layers, none of experts and none of DoRA."""
    if model_config.lora_adapter_path is None:
        return not model_config.lora.use_dora and not model_config.lora.target_parameters
    saved = _saved_adapters(model_config.lora_adapter_path)
    return not saved.get("use_dora") and not saved.get("target_parameters")


def largest_rank(model_config: HFModelConfig) -> int:
    """Return the largest rank of a model's LoRA adapters."""
    if model_config.lora_adapter_path is None:
        return model_config.lora_rank
    adapter_config = _saved_adapters(model_config.lora_adapter_path)
    return max([adapter_config["r"], *adapter_config.get("rank_pattern", {}).values()])


def adapted_modules(model_config: HFModelConfig) -> str | Sequence[str]:
    """Return the layers with LoRA adapters: endings of names, or one expression for all."""
    path = model_config.lora_adapter_path
    return model_config.target_modules if path is None else _saved_adapters(path)["target_modules"]


def _saved_adapters(path: str) -> JsonObject:
    """Return peft's description of a folder of adapters."""
    return json.loads((Path(path) / "adapter_config.json").read_text())


def _python(config: RolloutConfig) -> str:
    python = _user_arguments(config).get(PYTHON)
    if python is None:
        return engine_python(config.name) or sys.executable
    path = Path(str(python)).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.python={python}: there is no such file. Give the python of the "
            f"environment in which {config.name} is installed, for example /opt/{config.name}/bin/python."
        )
    return str(path.absolute())  # links are kept: Python finds its virtual environment by the link's folder


def _seconds(config: RolloutConfig, name: str, default: float) -> float:
    value = _user_arguments(config).get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(
            f"rollout.engine_kwargs.{config.name}.{name}={value!r} must be a positive number of seconds; null takes "
            f"the default, {default:g}."
        )
    return float(value)


def _user_arguments(config: RolloutConfig) -> Mapping[str, object]:
    return config.engine_kwargs.get(config.name) or {}
