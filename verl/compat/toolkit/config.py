"""Typed sections from composed configurations."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config import PPOConfig
from verl.config.base import BaseConfig, is_section
from verl.config.problems import report
from verl.errors import ConfigError
from verl.trainer.config.keys import all_inactive, drop, get, keys_of, same
from verl.trainer.config.load import load_config
from verl.trainer.config.other_spellings import drop_unset, other_spellings
from verl.trainer.config.rules import broken_rules
from verl.trainer.config.rules_algorithms import broken_algorithm_rules


def omega_conf_to_dataclass(config: object, dataclass_type: type | None = None) -> Any:
    """Build the typed section of a part of the configuration.

    A section of verl is checked as at the start of a run: other spellings are translated, unknown keys refused. Any
    other dataclass takes the fields of the same names; a field that it lacks is an error.

    Args:
        config: a part of a composed configuration, or a dict; a dataclass is returned as it is.
        dataclass_type: class of the section; by default the one that ``_target_`` in ``config`` names.

    Raises:
        ConfigError: there is no class, or the values do not fit it; all problems are listed.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return config
    if not config:
        return None if dataclass_type is None else dataclass_type()
    composed = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))  # type: ignore[arg-type]
    values: Any = OmegaConf.to_container(composed, resolve=True)
    cls = dataclass_type or _target(values)
    if not (issubclass(cls, BaseConfig) and is_section(cls)):
        values.pop("_target_", None)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    written: Any = OmegaConf.to_container(composed, resolve=False)
    for path, key in all_inactive(cls).items():
        # A default that refers to another section would look like a value that the user set.
        if same(get(written, path), key.yaml_default):
            drop(values, path)
    for path, key in keys_of(PPOConfig).items():
        if (
            key.section
            and issubclass(cls, key.section)
            and isinstance(nulls := get(other_spellings(PPOConfig), path), dict)
        ):
            drop_unset(values, nulls, ())
    return load_config(values, root=cls)


def _target(values: Mapping[str, object]) -> type:
    path = values.get("_target_")
    if path is None:
        raise ConfigError(
            "omega_conf_to_dataclass needs dataclass_type, or a _target_ in the configuration that names a class; it "
            f"has the keys {', '.join(map(str, values))}."
        )
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_={path} names no class: {error}.") from error


def validate_config(config: DictConfig | PPOConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Check a whole configuration of ``main_ppo`` as the command does, before any model loads, but for files of data.

    A program may have its data elsewhere, in memory for example. Keys and sections that verl does not know belong to
    the script that calls this, and are left to it.

    Args:
        config: the composed configuration.
        use_reference_policy: whether to check ``actor_rollout_ref.ref``.
        use_critic: whether to check ``critic``.

    Raises:
        ConfigError: lists all problems.
    """
    if isinstance(config, BaseConfig):
        problems = [*broken_rules(config, reads_data=False), *broken_algorithm_rules(config)]
        if problems := [problem for problem in problems if not problem.advice]:
            raise ConfigError(report(problems))
        return
    settings: Any = OmegaConf.to_container(config, resolve=False)
    checked = dict(settings)
    if not use_critic:
        checked.pop("critic", None)
    if not use_reference_policy and isinstance(actor := checked.get("actor_rollout_ref"), dict):
        checked["actor_rollout_ref"] = {name: value for name, value in actor.items() if name != "ref"}
    load_config(checked, for_program=True, reads_data=False)


def update_dict_with_config(dictionary: dict[str, object], config: DictConfig | Mapping[str, object]) -> None:
    """Overwrite the entries of a dict that a part of the configuration has too."""
    for name in dictionary:
        if name in config:
            dictionary[name] = config[name]


def is_distillation_enabled(config: DictConfig | Mapping[str, object] | None) -> bool:
    """Return whether the section ``distillation`` asks for a teacher."""
    return bool(config and config.get("enabled", False))
