"""YAML files that list classes of the user's: ``class_name``, ``config``, and further keys of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base.import_utils import load_object
from verl.base.registry import suggest
from verl.errors import ConfigError

T = TypeVar("T")


def read_entries(path: Path, setting: str, section: str, keys: Sequence[str]) -> list[Mapping[str, Any]]:
    """Read the list ``section`` of a YAML file.

    Args:
        path: the file.
        setting: the configuration key of ``path``, for error messages.
        section: name of the list.
        keys: what an entry may have.

    Raises:
        ConfigError: there is no such file, it holds no such list, or an entry has another key.
    """
    if not path.is_file():
        raise ConfigError(f"{setting}={path}: there is no such file. Give the path of a YAML file with '{section}'.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path} cannot be read as YAML: {error}") from error
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{setting}={path}: expected a list '{section}' whose entries have {', '.join(keys)}.")
    for index, entry in enumerate(entries):
        for key in entry:
            if key not in keys:
                raise ConfigError(
                    f"{path}: {section}[{index}]: unknown key '{key}'.{suggest(key, keys)} Known: {', '.join(keys)}."
                )
    return entries


def load_class(name: object, base: type[T], where: str) -> type[T]:
    """Load the class that an entry names: ``package.module.Class`` or ``file.py:Class``.

    Raises:
        ConfigError: there is no such class, or it does not derive from ``base``.
    """
    module, separator, cls = str(name or "").rpartition(":" if ".py:" in str(name) else ".")
    if not separator:
        raise ConfigError(f"{where}: class_name={name!r} must be package.module.Class or file.py:Class.")
    found = load_object(module, cls, f"{where}: class_name")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{where}: class_name='{name}' is no subclass of {base.__module__}.{base.__qualname__}.")
    return found
