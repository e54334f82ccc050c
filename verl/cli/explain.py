"""Explain a setting: its meaning, the commands that have it, what follows from it, and the code that reads it."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import verl
from verl.cli.commands import COMMAND_OF_CONFIGURATION
from verl.config.base import BaseConfig
from verl.config.problems import shown
from verl.trainer.config.generate import ENTRIES, status
from verl.trainer.config.keys import FORWARD_PASSES, PAIRS, Key, all_inactive, allowed_values, iter_keys, leaves
from verl.trainer.config.other_libraries import lines_about, other_name
from verl.trainer.config.translate import ALIASES, RETIRED

# How much is shown: keys that match a word, lines of the code, and keys like one that does not exist.
MAX_KEYS = 60
MAX_LINES = 8
MAX_GUESSES = 6


@dataclass
class Setting:
    """A key or section, with the commands that have it in this meaning."""

    path: str
    meaning: str
    allowed: str
    default: str
    is_section: bool
    source: str = ""
    """Path of the setting whose value is the default."""
    commands: list[str] = field(default_factory=list)


def all_settings() -> list[Setting]:
    """Return the settings of all commands; one that commands define alike comes once."""
    settings: dict[tuple[str, str, str, str], Setting] = {}
    for entry in ENTRIES:
        command = COMMAND_OF_CONFIGURATION[entry.name]
        for key in iter_keys(entry.root):
            setting = _setting(key, entry.root)
            same = (setting.path, setting.meaning, setting.allowed, setting.default)
            settings.setdefault(same, setting).commands.append(command)
    return list(settings.values())


def _setting(key: Key, root: type[BaseConfig]) -> Setting:
    if key.section is not None:
        return Setting(key.path, key.sentence, "a section", "", True)
    default, source = shown(key.yaml_default), key.source
    if source:
        default = f"that of {source} ({shown(leaves(root)[source].yaml_default)})"
    return Setting(key.path, key.sentence, allowed_values(key.field), default, False, source)


def matching(word: str, settings: list[Setting]) -> list[Setting]:
    """Return the settings that a word names: a key or section, the end of one, a part of a key, or its meaning.

    The first of these that is true of any setting decides: ``optim.lr`` is a key of one command and the end of keys of
    others, and names them all. Sections of one name come all, in front of their keys.
    """
    sections = [setting.path for setting in settings if setting.is_section and f".{setting.path}".endswith(f".{word}")]
    if sections and not any(setting.path == word and not setting.is_section for setting in settings):
        below = tuple(f"{section}." for section in sections)
        matches = [setting for setting in settings if f"{setting.path}.".startswith(below)]
        return sorted(matches, key=lambda setting: setting.path not in sections)
    tests = (
        lambda setting: f".{setting.path}".endswith(f".{word}") and not setting.is_section,
        lambda setting: f".{word}." in f".{setting.path}.",
        lambda setting: word in setting.path,
        lambda setting: re.search(rf"\b{re.escape(word)}", setting.meaning, re.IGNORECASE),
    )
    for test in tests:
        if matches := [setting for setting in settings if test(setting)]:
            return matches
    return []


def explanation(word: str) -> tuple[RenderableType, bool]:
    """Describe what a word names; without anything, the nearest keys and False."""
    word = word.partition("=")[0].lstrip("+~").strip(". ")
    if not word:
        return Text("No key was given. Name one, the end of one, a part of one, or a word of its meaning."), False
    settings = all_settings()
    parts: list[RenderableType] = [Text(line) for line in other_keys(word)]
    matches = matching(word, settings)
    if not matches and (other := other_name(word)):
        keys = " ".join(other[1].keys).split()
        matches = [setting for setting in settings if setting.path in keys]
    if not matches and not parts:
        return Text(f"No setting is called '{word}'. {_guesses(word, settings)}"), False
    if len({setting.path for setting in matches}) == 1:
        parts += [_page(setting, settings) for setting in matches]
    elif matches:
        parts.append(_list(matches))
    return Group(*parts), True


def other_keys(word: str) -> Iterator[str]:
    """Yield notes on a key that is another spelling, belongs to another library, or is not read by verl."""
    yield from lines_about(word)
    keys = {setting.path for setting in all_settings()}
    for alias in ALIASES:
        # What is a spelling in one command may be a key of another, which is described as such.
        if f".{alias.old}".endswith(f".{word}") and alias.old not in keys:
            yield f"{alias.old} is another spelling of {alias.new}"
    inactive = {key.path: key for entry in ENTRIES for key in all_inactive(entry.root).values()}
    for key in inactive.values():
        if f".{key.path}".endswith(f".{word}"):
            yield f"{key.path}: {status(key)}"
    for retired in RETIRED:
        if fnmatch.fnmatchcase(word, retired.pattern) or fnmatch.fnmatchcase(word, f"{retired.pattern}.*"):
            yield f"{word} is gone: {retired.reason}"


def follows_from(path: str, settings: list[Setting]) -> list[str]:
    """Return the settings whose default or value is taken from the one at ``path``."""
    followers = [setting.path for setting in settings if f"${{{path}}}" in setting.default or setting.source == path]
    followers += [derived for derived, source in FORWARD_PASSES if source == path]
    followers += [second if first == path else first for first, second in PAIRS if path in (first, second)]
    return list(dict.fromkeys(followers))


def keys_of_other_sections(setting: Setting, settings: list[Setting]) -> list[str]:
    """Return the keys of other sections that have the same section and name at their end: another ``optim.lr``."""
    if setting.is_section or "." not in setting.path:
        return []
    end = ".".join(setting.path.split(".")[-2:])
    alike = [
        other.path for other in _by_path(settings) if f".{other.path}".endswith(f".{end}") and not other.is_section
    ]
    return [path for path in alike if path != setting.path][:MAX_GUESSES]


@functools.cache  # a key that commands define in two ways has two pages
def read_at(path: str, alone: bool = True) -> list[str]:
    """Return lines of this package that read a key after its section, as ``actor.clip_ratio``.

    Comments and texts do not count, and a section that the code calls otherwise may be missed. Without such a line
    and with ``alone``, those that read its name after any object but ``self``, if no other setting is called so.
    """
    *_, section, name = ["", *path.split(".")]
    root = Path(verl.__file__).parent
    skipped = {"cli", "config", "testing"}  # the first two describe settings, and no run reads them there
    sources = (file for file in sorted(root.rglob("*.py")) if not skipped & {*file.relative_to(root).parts})
    files = {file: file.read_text() for file in sources}
    reads = {
        (file, node.end_lineno or node.lineno): _owner_of(node)
        for file, text in files.items()
        if re.search(rf"\.{name}\b", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
    }
    lines = [file_and_line for file_and_line, owner in reads.items() if owner == section]
    if not lines and alone and [other.path.rpartition(".")[2] for other in _by_path(all_settings())].count(name) == 1:
        lines = [file_and_line for file_and_line, owner in reads.items() if owner != "self"]
    return [f"{file.relative_to(root.parent)}:{line}" for file, line in sorted(lines)]


def _owner_of(node: ast.Attribute) -> str:
    """Return the last name before the attribute: ``actor`` of ``config.actor.clip_ratio``."""
    owner = node.value
    return owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""


def _by_path(settings: list[Setting]) -> list[Setting]:
    """Return one setting of each path."""
    return list({setting.path: setting for setting in settings}.values())


def _guesses(word: str, settings: list[Setting]) -> str:
    names: dict[str, list[str]] = {}
    for setting in settings:
        names.setdefault(setting.path.rpartition(".")[2], []).append(setting.path)
        names.setdefault(setting.path, []).append(setting.path)
    close = difflib.get_close_matches(word, names, n=MAX_GUESSES, cutoff=0.6)
    guesses = list(dict.fromkeys(path for name in close for path in names[name]))[:MAX_GUESSES]
    return f"Near it: {', '.join(guesses)}." if guesses else "Try a part of its name, or a word of its meaning."


def _page(setting: Setting, settings: list[Setting]) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_row("  meaning", Text(setting.meaning))
    if not setting.is_section:
        rows.add_row("  takes", Text(setting.allowed))
        rows.add_row("  default", Text(setting.default))
    rows.add_row("  commands", Text(", ".join(setting.commands)))
    followers = follows_from(setting.path, settings)
    if followers:
        rows.add_row("  followed by", Text("\n".join(followers)))
    if see_also := [path for path in keys_of_other_sections(setting, settings) if path not in followers]:
        rows.add_row("  see also", Text("\n".join(see_also)))
    lines = [] if setting.is_section else read_at(setting.path, alone=not followers)
    if lines:
        rest = f"\n… and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        rows.add_row("  read at", Text("\n".join(lines[:MAX_LINES]) + rest))
    elif followers and not setting.is_section:
        rows.add_row("  read at", Text("no line: its value is read through the settings that follow it"))
    return Group(Text(setting.path, style="bold"), rows)


def _list(settings: list[Setting]) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(overflow="fold")  # a cut key could not be copied
    rows.add_column()
    by_path = _by_path(settings)
    for setting in by_path[:MAX_KEYS]:
        default = "" if setting.is_section else f" [{setting.default}]"
        rows.add_row(Text(setting.path, style="bold"), Text(setting.meaning + default, style="dim"))
    rest = len(by_path) - MAX_KEYS
    return Group(rows, Text(f"… and {rest} more: name a longer part of the key")) if rest > 0 else rows
