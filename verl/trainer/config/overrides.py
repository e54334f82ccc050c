"""The command line before Hydra reads it, and composing without a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.fs import name_problem

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_DIR = Path(__file__).parent

_FOLDER_FLAGS = ("--config-path", "-cp", "--config-dir", "-cd")
_VALUE_FLAGS = (
    *_FOLDER_FLAGS,
    "--config-name",
    "-cn",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--info",
    "-i",
    "--experimental-rerun",
)


def force_overrides(arguments: Sequence[str]) -> list[str]:
    """Flags first, then overrides; ``key=value`` and ``+key=value`` become ``++key=value``.

    So a key that Hydra does not know reaches ``load_config``, which knows other spellings and the
    nearest name. Choices of config groups, ``hydra.*`` and deletions (``~key``) stay as they are.
    """
    flags, overrides, folders = [], [], [CONFIG_DIR]
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in _VALUE_FLAGS and rest and not ("=" in rest[0] and argument in ("--info", "-i")):
            value = rest.pop(0)
            if argument in _FOLDER_FLAGS and Path(value).is_dir():
                # Relative to where the user is, as any other path on a command line.
                value = str(Path(value).absolute())
                folders.append(Path(value))
            flags += [argument, value]
        elif argument.startswith("-") or "=" not in argument:
            flag, is_assigned, value = argument.partition("=")
            if is_assigned and flag in _FOLDER_FLAGS and Path(value).is_dir():
                folders.append(Path(value).absolute())
                argument = f"{flag}={folders[-1]}"
            (flags if argument.startswith("-") else overrides).append(argument)
        else:
            overrides.append(argument)
    return flags + [_forced(override, folders) for override in overrides]


def _forced(override: str, folders: Sequence[Path]) -> str:
    key = override.partition("=")[0].lstrip("+")
    is_name = "." not in key and name_problem(key) is None
    is_group = "@" in key or "/" in key or (is_name and any((folder / key).is_dir() for folder in folders))
    if "=" not in override or override.startswith("~") or is_group or key.split(".")[0] == "hydra":
        return override
    return "++" + override.lstrip("+")


def keys_set(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that overrides set."""
    return {override.partition("=")[0].lstrip("+~") for override in overrides}


def compose(overrides: Sequence[str] = (), config_name: str = "ppo_trainer") -> DictConfig:
    """What ``python -m verl.trainer...  <overrides>`` composes, without a command line."""
    import hydra

    add_search_path()
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONFIG_DIR)):
        return hydra.compose(config_name, overrides=force_overrides(overrides))


def add_search_path() -> None:
    """Let a user's own YAML in another folder name ours in its defaults list."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class VerlSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("verl", "pkg://verl.trainer.config")

    registered = {plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    if VerlSearchPath.__name__ not in registered:
        Plugins.instance().register(VerlSearchPath)
