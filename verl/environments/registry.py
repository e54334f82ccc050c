"""Environments of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from verl.base.import_utils import user_code
from verl.base.registry import suggest
from verl.base.types import JsonMapping, JsonObject
from verl.environments.base import Environment
from verl.errors import ConfigError
from verl.utils.class_entries import Entries, load_class, read_entries

KEYS = ("name", "class_name", "config", "seed_per", "max_action_tokens", "max_observation_tokens")
SETTING = "actor_rollout_ref.rollout.multi_turn.environment_config_path"
SeedPer = Literal["prompt", "sample"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentEntry:
    """An environment that rows can name."""

    name: str
    cls: type[Environment]
    config: JsonObject = field(default_factory=dict)
    seed_per: SeedPer = "prompt"
    """Whether all samples of a prompt meet the same episode, which baselines of a group need, or each its own."""
    max_action_tokens: int | None = None
    """Most tokens of one turn of the policy; None sets no limit of its own."""
    max_observation_tokens: int = 1024
    """Most tokens of one observation; a longer one loses its middle."""


def read_environments(environment_config_file: Entries) -> dict[str, EnvironmentEntry]:
    """Read the environments of a YAML file with a list ``environment``, or of such a list, and check them.

    Each entry has ``name``, which rows give in ``environment_kwargs.name``,
    ``class_name`` (``package.module.Class`` or ``file.py:Class``), ``config`` (what the class reads), and the further
    fields of :class:`EnvironmentEntry`. Without ``name`` it is the class's, in small letters and without a last
    ``Environment``.

    Returns:
        the environments by name.

    Raises:
        ConfigError: the file, an entry or a class is wrong, or two have one name.
    """
    entries: dict[str, EnvironmentEntry] = {}
    for where, settings in read_entries(environment_config_file, SETTING, "environment", KEYS):
        entry = _entry(settings, where)
        if entry.name in entries:
            raise ConfigError(f"{where}: another environment is called '{entry.name}' too. Give each its own name.")
        entries[entry.name] = entry
        try:
            with user_code(f"{entry.cls.__name__} refuses its config"):
                entry.cls.check(entry.config)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return entries


def _entry(entry: JsonMapping, where: str) -> EnvironmentEntry:
    cls = load_class(entry.get("class_name"), Environment, f"{where}.class_name")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"{where}: {cls.__name__} has no {' and '.join(missing)}, which an environment must define.")
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config={config!r:.80} must be a mapping.")
    rest = {name: entry[name] for name in KEYS[3:] if entry.get(name) is not None}
    if (seed_per := rest.get("seed_per", "prompt")) not in get_args(SeedPer):
        raise ConfigError(f"{where}: seed_per={seed_per!r} is unknown; there are {' and '.join(get_args(SeedPer))}.")
    for name in ("max_action_tokens", "max_observation_tokens"):
        if name in rest and (type(rest[name]) is not int or rest[name] < 1):
            raise ConfigError(f"{where}: {name}={rest[name]!r} must be a whole number of at least 1.")
    name = entry.get("name") or cls.__name__.removesuffix("Environment").lower()
    return EnvironmentEntry(name=str(name), cls=cls, config=cast(JsonObject, config), **rest)


def environment_of_row(entries: Mapping[str, EnvironmentEntry], kwargs: object) -> tuple[EnvironmentEntry, dict]:
    """Return the environment that a row names, or the only one there is, and the arguments of its ``reset``.

    Raises:
        ConfigError: the row's ``environment_kwargs`` name no environment that there is.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"environment_kwargs is {kwargs!r:.100}; it is an object with a name, and arguments.")
    arguments = dict(cast(Any, kwargs) or {})
    name = str(arguments.pop("name", None) or "")
    if not name and len(entries) == 1:
        return next(iter(entries.values())), arguments
    if name not in entries:
        known = ", ".join(sorted(entries))
        there = f"There are: {known}." if known else "There are none."
        asked = f"there is no environment '{name}'." if name else "the row names no environment."
        raise ConfigError(
            f"environment_kwargs.name: {asked}{suggest(name, list(entries))} {there} The file of {SETTING} lists them."
        )
    return entries[name], arguments
