"""Keys of a run under the names of other releases, as nulls of a YAML file.

Hydra refuses to override a key that no file has, so a program under its own ``hydra.main`` could not set
``reward.reward_manager.name``. Null says that nobody has set it. Commands of verl take any key, and load no such file.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from verl.config import BaseConfig, PPOConfig
from verl.config.base import config_fields
from verl.trainer.config import key_releases, key_table
from verl.trainer.config.keys import Tree, get, keys_of, put

OTHER_SPELLINGS = "VERL_OTHER_SPELLINGS"
"""Environment variable that chooses the file while a command of verl composes."""

SECTIONS = ("critic.fsdp", "reward", "sandbox_fusion")
"""Sections that stand for a section here as a whole."""


@cache
def other_spellings(root: type[BaseConfig]) -> Tree:
    """Return nulls for the keys of ``root`` in sections that only other releases have, such as ``reward``."""
    nulls: Tree = {}
    if root is not PPOConfig:
        return nulls
    leaves = [path for path, key in keys_of(root).items() if key.section is None]
    for alias in (*key_table.ALIASES, *key_releases.ALIASES):
        section, _, below = alias.old.partition(".")
        if alias.old not in SECTIONS and (section in config_fields(root) or not below):
            continue
        for path in leaves:
            spelling = alias.old + path.removeprefix(alias.new)
            if (path == alias.new or path.startswith(f"{alias.new}.")) and get(nulls, spelling, nulls) is nulls:
                put(nulls, spelling, None)
    for sections, names in key_releases.PROGRAM_KEYS:
        for section in sections:
            for name in names.split():
                put(nulls, f"{section}.{name}", None)
    return nulls


def drop_unset(settings: Tree, nulls: Tree, explicit: Collection[str], section: str = "") -> None:
    """Remove the nulls that nobody has set from a composed configuration, in place."""
    for name, below in nulls.items():
        path = f"{section}{name}"
        if name not in settings:
            continue
        if isinstance(settings[name], dict) and isinstance(below, dict):
            drop_unset(settings[name], below, explicit, f"{path}.")
            if not settings[name]:
                del settings[name]
        elif settings[name] is None and below is None and path not in explicit:
            del settings[name]
