"""The words of a command line: flags and overrides, and what is wrong with them, each with the form that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from verl.config import (
    BaseConfig,
    DPOConfig,
    EvalConfig,
    GenerationConfig,
    PPOConfig,
    Problem,
    RMConfig,
    ServeConfig,
    SFTConfig,
)
from verl.trainer.config.keys import leaves, nearest
from verl.trainer.config.omegaconf_private import yaml_loader
from verl.trainer.config.other_libraries import remedy_for
from verl.trainer.config.overrides import CONFIG_DIR, override_problems

CONFIG_NAMES: dict[type[BaseConfig], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    DPOConfig: "dpo_trainer",
    GenerationConfig: "generation",
    EvalConfig: "evaluation",
    ServeConfig: "serve",
}
"""Root section of a command → its YAML file."""

_LONG = {
    "-h": "--help", "-c": "--cfg", "-p": "--package", "-cn": "--config-name", "-cp": "--config-path",
    "-cd": "--config-dir", "-m": "--multirun", "-i": "--info", "-r": "--run", "-sc": "--shell-completion",
}  # fmt: skip
_WITH_VALUE = ("--cfg", "--package", "--config-name", "--config-path", "--config-dir")
_ALONE = ("--help", "--resolve")
_LOOP = 'write a loop in the shell, such as: for lr in 1e-6 3e-6; do verl train ... optim.lr="$lr"; done'
_NOT_HERE = {
    "--multirun": _LOOP,
    "--info": "--cfg all shows the whole configuration",
    "--run": "leave it out",
    "--shell-completion": "the command verl completes keys: docs/cli.md",
    "--hydra-help": "--help lists flags and settings",
    "--version": "write verl --version",
    "--experimental-rerun": "start from the settings of a run: --config-dir FOLDER/.hydra --config-name config",
}
"""Flags of Hydra that verl has not → what to write."""
MAX_GUESSES = 4
"""Keys that a message names where a word may mean several."""


@dataclass(frozen=True)
class Words:
    """A command line.

    Attributes:
        flags: long name of each flag → its value, an empty one for a flag that has none.
        overrides: the other words, as typed.
        problems: what cannot be read.
    """

    flags: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def config_folder(self) -> Path:
        """Folder of the main YAML file: ``--config-path``, from the working directory.

        ``config``, which public scripts name, is verl's own folder unless there is one here.
        """
        folder = Path(self.flags.get("--config-path", CONFIG_DIR))
        return CONFIG_DIR if folder == Path("config") and not folder.is_dir() else folder.absolute()

    @property
    def more_configs(self) -> Path | None:
        """A further folder of YAML files: ``--config-dir``."""
        return Path(self.flags["--config-dir"]).absolute() if "--config-dir" in self.flags else None

    @property
    def folders(self) -> list[Path]:
        """All folders of the user's YAML files."""
        return [self.config_folder, *filter(None, [self.more_configs])]


def read_words(words: Sequence[str], root: type[BaseConfig]) -> Words:
    """Part a command line into flags and overrides of a command whose configuration has the section ``root``."""
    read, rest = Words(), list(words)
    while rest:
        word = rest.pop(0)
        name, is_assigned, value = word.partition("=")
        flag = _LONG.get(name, name)
        if name in ("--config", "--config-file", "--config_file", "--yaml") or (
            not name.startswith("-") and not is_assigned and name.endswith((".yaml", ".yml"))
        ):
            file = Path(value or (rest.pop(0) if name.startswith("-") and rest else name.lstrip("-")))
            remedy = f"write --config-dir {file.parent} --config-name {file.stem}, and in the file: defaults: "
            remedy += f"[{CONFIG_NAMES[root]}, _self_]"
            problem = Problem("", word, "a YAML file is named by its folder and its name", remedy=remedy)
            read.problems.append(problem)
        elif flag in _WITH_VALUE:
            if not is_assigned and rest and not rest[0].startswith("-"):  # a word that begins with "-" is the next flag
                value = rest.pop(0)
            read.flags[flag] = value
            if flag == "--cfg" and value not in ("job", "hydra", "all"):
                cause = "it shows one of three configurations"
                read.problems.append(Problem("", f"{name} {value}".strip(), cause, "job, hydra, all"))
            elif not value:
                read.problems.append(Problem("", name, "its value is missing", remedy=f"write {name} VALUE"))
        elif flag in _ALONE:
            read.flags[flag] = ""
        elif flag in _NOT_HERE:
            read.problems.append(Problem("", word, "verl does not have this flag of Hydra", remedy=_NOT_HERE[flag]))
        elif word.startswith("-"):
            if not is_assigned and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                value = rest.pop(0)
                word += f" {value}"
            read.problems.append(_unknown_flag(word, name.lstrip("-"), value, root))
        elif (joined := _joined(word, rest)) is not None:
            written = " ".join([word, *rest[: joined[1]]])
            del rest[: joined[1]]
            problem = Problem("", written, "a setting is written without spaces", remedy=f"write {joined[0]}")
            read.problems.append(problem)
        else:
            read.overrides.append(word)
    read.problems.extend(override_problems(read.overrides, root))
    return read


def _joined(word: str, rest: Sequence[str]) -> tuple[str, int] | None:
    """Return ``KEY=VALUE`` of a setting that is spread over several words, and how many of ``rest`` belong to it."""
    following = [*rest[:2], "", ""]
    is_value = [bool(text) and "=" not in text and not text.startswith("-") for text in following]
    if following[0] == "=" and is_value[1]:
        return f"{word}={following[1]}", 2
    if "=" not in word and len(following[0]) > 1 and following[0].startswith("="):
        return f"{word}{following[0]}", 1
    if word.endswith((":", "=")) and word.count("=") < 2 and len(word) > 1 and is_value[0]:
        return f"{word.rstrip(':=')}={following[0]}", 1
    return None


def _unknown_flag(word: str, name: str, value: str, root: type[BaseConfig]) -> Problem:
    """Describe a flag that is a setting, of verl, TRL or OpenRLHF, or nothing; ``value`` is what follows it, if any."""
    all_keys, key = leaves(root), name.replace("-", "_")
    ending = [path for path in all_keys if f".{path}".endswith(f".{key}")] or list(
        filter(None, [nearest(key, [*all_keys])])
    )
    remedy = remedy_for(name, yaml.load(value, Loader=yaml_loader()) if value else True, all_keys)
    remedy = remedy or " or ".join(f"{path}={value or 'VALUE'}" for path in ending[:MAX_GUESSES])
    cause = "settings are written KEY=VALUE, without dashes" if remedy else "there is no such flag"
    return Problem("", word, cause, remedy=remedy or "--help lists flags and settings")
