"""Lists of classes of the user's, in YAML files or in the configuration itself: ``class_name`` and further keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base.import_utils import load_object
from verl.base.registry import suggest
from verl.base.types import JsonMapping
from verl.errors import ConfigError

T = TypeVar("T")

Entries = str | Path | Sequence[JsonMapping]
"""Path of a YAML file with a list of classes, or the list."""


def read_entries(source: Entries, setting: str, section: str, keys: Sequence[str]) -> Iterator[tuple[str, JsonMapping]]:
    """Yield the entries of a list, each after its place, for error messages.

    Args:
        source: a file, or the list.
        setting: the configuration key of ``source``, for error messages.
        section: name of the list in a file.
        keys: what an entry may have.

    Raises:
        ConfigError: there is no such file, it holds no such list, or an entry has another key.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        where, entries = f"{path}: {section}", _list_of_file(path, setting, section, keys)
    else:
        where, entries = setting, source
    for index, entry in enumerate(entries):
        if unknown := next((key for key in entry if key not in keys), None):
            raise ConfigError(
                f"{where}[{index}]: unknown key '{unknown}'.{suggest(unknown, keys)} Known: {', '.join(keys)}."
            )
        yield f"{where}[{index}]", entry


def _list_of_file(path: Path, setting: str, section: str, keys: Sequence[str]) -> list[Mapping[str, object]]:
    if not path.is_file():
        raise ConfigError(f"{setting}={path}: there is no such file. Give the path of a YAML file with '{section}'.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path} cannot be read as YAML: {error}") from error
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{setting}={path}: expected a list '{section}' whose entries have {', '.join(keys)}.")
    return entries


def load_class(name: object, base: type[T], where: str) -> type[T]:
    """Load the class that an entry names: ``package.module.Class`` or ``file.py:Class``.

    Raises:
        ConfigError: there is no such class, or it does not derive from ``base``.
    """
    module, separator, cls = str(name or "").rpartition(":" if ".py:" in str(name) else ".")
    if not separator:
        raise ConfigError(f"{where}={name!r} must be package.module.Class or file.py:Class.")
    loaded = load_object(module, cls, where)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{where}='{name}' is no subclass of {base.__module__}.{base.__qualname__}.")
    return loaded
