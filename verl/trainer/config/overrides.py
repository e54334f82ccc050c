"""Overrides of a command line, ``KEY=VALUE``: the form in which Hydra reads them, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.base.fs import name_problem
from verl.config import BaseConfig, Problem
from verl.trainer.config.key_releases import ALIASES as RELEASE_ALIASES
from verl.trainer.config.key_table import ALIASES
from verl.trainer.config.keys import Tree, iter_keys, keys_of, merged, put

CONFIG_DIR = Path(__file__).parent
"""Folder of verl's own YAML files."""


_PLAIN_WORD = re.compile(r"[\w.+:/-]+")
"""What Hydra reads as a number, a truth value or a text, without quotes, brackets or interpolation."""
_PLAIN_VALUE = re.compile(rf"{_PLAIN_WORD.pattern}|\[{_PLAIN_WORD.pattern}(,{_PLAIN_WORD.pattern})*\]")


def force_overrides(overrides: Iterable[str], root: type[BaseConfig], folders: Iterable[Path] = ()) -> list[str]:
    """Turn ``key=value`` and ``+key=value`` into ``++key=value``, with quotes around the values of texts.

    Hydra then accepts any key, and ``load_config`` handles other spellings and suggests the nearest name. Quotes keep
    a name such as ``2026_11_28`` from becoming a number. Choices of config groups, ``hydra.*`` and deletions
    (``~key``) are unchanged.

    Args:
        overrides: as typed.
        root: root section of the command's configuration.
        folders: folders of the user's YAML files, whose subfolders are config groups too.
    """
    all_folders = [CONFIG_DIR, *folders]
    return [_forced(override, root, all_folders) for override in overrides]


def _forced(override: str, root: type[BaseConfig], folders: Sequence[Path]) -> str:
    if (key := _key_set(override, folders)) is None:
        return override
    value = override.partition("=")[2]
    if _PLAIN_VALUE.fullmatch(value) and takes_text(key, root):
        value = _PLAIN_WORD.sub(lambda word: word[0] if word[0].lower() == "null" else f"'{word[0]}'", value)
    return f"++{key}={value}"


def _key_set(override: str, folders: Sequence[Path]) -> str | None:
    """Return the key to which an override gives a value; None of a deletion, a config group, a setting of Hydra."""
    key, is_assigned, value = override.lstrip("+").partition("=")
    is_deleted, is_hydras = key.startswith("~"), key.split(".")[0] == "hydra"
    return None if not is_assigned or is_deleted or is_hydras or _is_group(key, value, folders) else key


def _is_group(key: str, value: str, folders: Sequence[Path]) -> bool:
    """Return whether ``key=value`` selects a file of a config group; for verl's groups, only if the file exists."""
    if "@" in key or "/" in key:
        return True
    if "." in key or name_problem(key) is not None:
        return False
    is_file = value in {path.stem for path in (CONFIG_DIR / key).glob("*.yaml")}
    return is_file or any((folder / key).is_dir() for folder in folders if folder != CONFIG_DIR)


def settings_of(overrides: Iterable[str], folders: Iterable[Path] = ()) -> Tree:
    """Return the values that overrides give to keys, as a nested dict; arguments as of :func:`force_overrides`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, all_folders = OverridesParser.create(), [CONFIG_DIR, *folders]
    settings: Tree = {}
    for override in overrides:
        if (key := _key_set(override, all_folders)) is not None:
            setting: Tree = {}
            put(setting, key, parser.parse_override(override).value())
            settings = merged(settings, setting)
    return settings


def takes_text(path: str, root: type[BaseConfig]) -> bool:
    """Return whether a key, or the key of another spelling, takes a text or a list of texts, and nothing else."""
    keys = keys_of(root)
    paths = (
        [path]
        if path in keys
        else [
            alias.new + path.removeprefix(alias.old)
            for alias in (*ALIASES, *RELEASE_ALIASES)
            if path == alias.old or path.startswith(f"{alias.old}.")
        ]
    )
    return any(keys[name].takes_text_only for name in paths if name in keys)


def override_problems(overrides: Sequence[str], root: type[BaseConfig]) -> list[Problem]:
    """Return the problems of overrides that Hydra cannot read, or that would delete a section below ``root``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, problems = OverridesParser.create(), []
    sections = {key.path for key in iter_keys(root) if key.section is not None}
    for override in overrides:
        key, is_assigned, value = override.partition("=")
        if key.startswith("~") and key[1:].partition("@")[0] in sections:
            cause = "a section cannot be deleted; it would come back with its defaults"
            remedy = "leave this out: what a run has no use for, such as the critic with grpo, is not started"
            problems.append(Problem("", override, cause, remedy=remedy))
            continue
        try:
            parsed = parser.parse_override(override)
            can_be_read = bool(key.lstrip("+~"))
            if parsed.is_sweep_override():
                cause = "several values are several runs, and a command starts one"
                problems.append(Problem(key.lstrip("+"), value, cause, remedy=f"a list is {key.lstrip('+')}=[{value}]"))
        except HydraException:
            can_be_read = False
        if can_be_read:
            continue
        if is_assigned and key.lstrip("+~") and key == key.strip():
            cause = "brackets and quotes do not match, or a special character is not quoted"
            remedy = "quote it twice, once for the shell: KEY=\"'VALUE'\", and lists as KEY=\"['a','b']\""
            problems.append(Problem(key.lstrip("+"), value, cause, remedy=remedy))
        else:
            cause, remedy = "a setting is written KEY=VALUE, without spaces", "join key, equals sign and value"
            problems.append(Problem("", override, cause, remedy=remedy))
    return problems


def keys_set(overrides: Iterable[str]) -> set[str]:
    """Return the dotted keys that overrides set or delete."""
    return {override.partition("=")[0].lstrip("+~") for override in overrides}
