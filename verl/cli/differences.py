"""The settings of runs, from the files that they leave, and how two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml
from rich.table import Column, Table
from rich.text import Text

from verl.base.nested import flat
from verl.base.plugins import load
from verl.base.redact import without_secrets
from verl.cli.commands import COMMAND_OF_CONFIGURATION
from verl.config.problems import shown
from verl.errors import ConfigError
from verl.trainer.config.generate import ENTRIES
from verl.trainer.config.keys import leaves

ABSENT = "(not set)"
_SOURCES = (
    "Name a YAML file, a folder of Hydra (it has .hydra/config.yaml), a folder global_step_N of a run, its log of the "
    "tracker `file`, or a folder with one of these."
)


def read_settings(name: str) -> dict[str, object]:
    """Read the settings of a run, by dotted key.

    Raises:
        ConfigError: there is no such file, or no settings in it.
    """
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise ConfigError(f"there is no '{name}'. {_SOURCES}")
    for file in _candidates(path):
        if not file.is_file():
            continue
        try:
            settings = _settings_of(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{file} cannot be read as settings: {error}") from error
        if settings:  # checkpoints keep no empty sections
            return {key: value for key, value in flat(settings) if value != {}}
    raise ConfigError(f"there are no settings in {name}. {_SOURCES}")


def _candidates(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    usual = [path / ".hydra/config.yaml", path / "config.yaml", path / "trainer_state.json"]
    steps = [step for step in path.glob("global_step_*") if step.name.rpartition("_")[2].isdecimal()]
    steps.sort(key=lambda step: int(step.name.rpartition("_")[2]), reverse=True)
    return [*usual, *sorted(path.glob("*.run.jsonl")), *(step / "trainer_state.json" for step in steps)]


def _settings_of(file: Path) -> Mapping[str, object]:
    if file.suffix == ".jsonl":
        beside = file if file.name.endswith(".run.jsonl") else file.with_suffix(".run.jsonl")
        return load("view.discovery:read_config")(beside)
    if file.suffix == ".json":
        return _mapping(_mapping(json.loads(file.read_text())).get("settings"))
    settings = _mapping(yaml.safe_load(file.read_text()))
    return _as_run(settings) if file.parent.name == ".hydra" else settings


def _as_run(composed: Mapping[str, object]) -> Mapping[str, object]:
    """Return composed settings as a run of them writes them into its checkpoints: resolved, derived, without secrets.

    Raises:
        ConfigError: no run of verl could have these settings.
    """
    from verl.trainer.config.load import load_config

    names = kinds({key: value for key, value in flat(composed) if value != {}})
    roots = [entry.root for entry in ENTRIES if COMMAND_OF_CONFIGURATION[entry.name] in names]
    if not roots:
        return composed
    config = load_config(composed, roots[0], with_rules=False)
    return json.loads(json.dumps(without_secrets(config.to_dict())))  # tuples become lists, as in a checkpoint


def _mapping(value: object) -> Mapping[str, object]:
    """Return a mapping of settings; anything else holds none."""
    return value if isinstance(value, Mapping) else {}


def differences(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return key → the two values of settings that differ; a key that one lacks has ``(not set)`` there."""
    pairs = {key: (first.get(key, ABSENT), second.get(key, ABSENT)) for key in sorted(first.keys() | second.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def kinds(settings: Mapping[str, object]) -> list[str]:
    """Return the commands that could have run with settings: those that know most of their keys, none if none does."""
    key_counts = {
        name: len(leaves(entry.root).keys() & settings.keys())
        for entry in ENTRIES
        for name in [COMMAND_OF_CONFIGURATION[entry.name]]
    }
    most = max(key_counts.values())
    return [name for name, count in key_counts.items() if count == most > 0]


def describe_kinds(first_kinds: list[str], second_kinds: list[str], first_name: str, second_name: str) -> Text | None:
    """Say that two runs are of different kinds; None if they may be of one."""
    if not first_kinds or not second_kinds or {*first_kinds} & {*second_kinds}:
        return None
    return Text(
        f"The runs are of different kinds: {first_name} has settings of {' or '.join(first_kinds)}, {second_name} of "
        f"{' or '.join(second_kinds)}. Of the keys that both have these differ:"
    )


def differences_table(
    differences: Mapping[str, tuple[object, object]], first_name: str, second_name: str
) -> Table | Text:
    """Make a table of differences."""
    if not differences:
        return Text("The settings are the same.")
    columns = [
        Column(name, overflow="fold") for name in ("key", first_name, second_name)
    ]  # a cut key could not be copied
    table = Table(*columns, box=None)
    for key, (left, right) in differences.items():
        table.add_row(Text(key, style="bold"), Text(shown(left)), Text(shown(right)))
    return table
