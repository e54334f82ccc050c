"""Entry points: parse overrides, compose YAML with Hydra, check the configuration, mask secrets in Hydra's files."""

from __future__ import annotations

import gc
import inspect
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from threading import Event
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base.fs import name_problem
from verl.base.import_utils import prepare_process
from verl.base.lazy import importing
from verl.base.redact import redacted, secrets_in, without_secrets
from verl.base.streams import open_closed_streams
from verl.config import (
    BaseConfig,
    DPOConfig,
    EvalConfig,
    GenerationConfig,
    PPOConfig,
    Problem,
    RMConfig,
    SFTConfig,
)
from verl.config.problems import report
from verl.errors import CheckpointError, ConfigError, DataError, NonFiniteError, ResourceError, RewardError
from verl.supervision.interruption import interruptible
from verl.trainer.config.keys import iter_keys, leaves, nearest
from verl.trainer.config.named_keys import keys_named
from verl.trainer.config.omegaconf_private import use_faster_parsers, yaml_loader
from verl.trainer.config.other_libraries import remedy_for
from verl.trainer.config.translate import Translator

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

PLAIN_ERRORS = (ConfigError, DataError, ResourceError, CheckpointError, RewardError, NonFiniteError)
"""Errors caused by the user's settings, data, code or machine; a traceback of verl's code would not help the user."""

CONFIG_DIR = Path(__file__).parent
FULL_ERROR = "HYDRA_FULL_ERROR"
MOST_GUESSES = 4
"""Keys that a message names where a word may mean several."""

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
_FLAGS = (
    "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m",
    "--shell-completion", "-sc",
)  # fmt: skip
"""Flags of Hydra that have no value."""
CONFIG_NAMES: dict[type[BaseConfig], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    DPOConfig: "dpo_trainer",
    GenerationConfig: "generation",
    EvalConfig: "evaluation",
}
"""Root section of a command → its YAML file."""


def force_overrides(arguments: Sequence[str]) -> list[str]:
    """Put flags before overrides, and turn ``key=value`` and ``+key=value`` into ``++key=value``.

    Hydra then accepts any key, and ``load_config`` handles other spellings and suggests the nearest name.
    Choices of config groups, ``hydra.*`` and deletions (``~key``) are unchanged.
    """
    flags, overrides = _parted(arguments)
    folders = [CONFIG_DIR]
    for flag in flags:
        if flag[0] not in _FOLDER_FLAGS:
            continue
        # Hydra reads a relative --config-path from the entry point's folder; users mean the working directory, and
        # with "config", which public scripts have, the folder of verl's own YAML files.
        if Path(flag[-1]).is_dir():
            flag[-1] = str(Path(flag[-1]).absolute())
            folders.append(Path(flag[-1]))
        elif Path(flag[-1]) == Path("config"):
            flag[-1] = str(CONFIG_DIR)
    return [*itertools.chain(*flags), *(_forced(override, folders) for override in overrides)]


def _parted(arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Part a command line into flags, each with its value if it has one, and overrides."""
    flags: list[list[str]] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, is_assigned, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif name not in _VALUE_FLAGS:
            flags.append([argument])
        elif is_assigned:
            flags.append([name, value])
        else:
            # The value of --info may be left out; a word that begins with "-" is the next flag.
            has_value = rest and not rest[0].startswith("-") and not (name in ("--info", "-i") and "=" in rest[0])
            flags.append([name, rest.pop(0)] if has_value else [name])
    return flags, overrides


def _forced(override: str, folders: Sequence[Path]) -> str:
    key = override.partition("=")[0].lstrip("+")
    is_name = "." not in key and name_problem(key) is None
    is_group = "@" in key or "/" in key or (is_name and any((folder / key).is_dir() for folder in folders))
    if "=" not in override or override.startswith("~") or is_group or key.split(".")[0] == "hydra":
        return override
    return "++" + override.lstrip("+")


def word_problems(arguments: Sequence[str], root: type[BaseConfig]) -> list[Problem]:
    """Return the problems of a command line before Hydra reads it, each with the form that is right.

    They are flags that there are not, flags without their value, ``KEY = VALUE`` with spaces, and what
    :func:`override_problems` says of the other words.
    """
    arguments, problems, overrides = list(arguments), [], []
    while arguments:
        word = arguments.pop(0)
        name, is_assigned, value = word.partition("=")
        if name in ("--config", "--config-file", "--config_file", "--yaml") or (
            not name.startswith("-") and not is_assigned and name.endswith((".yaml", ".yml"))
        ):
            file = Path(value or (arguments.pop(0) if name.startswith("-") and arguments else name.lstrip("-")))
            remedy = f"write --config-dir {file.parent} --config-name {file.stem}, and in the file: defaults: "
            remedy += f"[{CONFIG_NAMES[root]}, _self_]"
            problems.append(Problem("", word, "a YAML file is named by its folder and its name", remedy=remedy))
        elif name in _VALUE_FLAGS:
            # The value of --info may be left out; a word that begins with "-" is the next flag.
            takes_next = not is_assigned and arguments and not arguments[0].startswith("-")
            if takes_next and not (name in ("--info", "-i") and "=" in arguments[0]):
                value = arguments.pop(0)
            problems += _flag_problems(name, value)
        elif word.startswith("-") and name not in _FLAGS:
            if not is_assigned and arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
                value = arguments.pop(0)
                word += f" {value}"
            problems.append(_unknown_flag(word, name.lstrip("-"), value, root))
        elif word.startswith("-"):
            continue
        elif (joined := _joined(word, arguments)) is not None:
            written = " ".join([word, *arguments[: joined[1]]])
            del arguments[: joined[1]]
            problems.append(Problem("", written, "a setting is written without spaces", remedy=f"write {joined[0]}"))
        else:
            overrides.append(word)
    return [*problems, *override_problems(overrides, root)]


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


def _flag_problems(name: str, value: str) -> Iterator[Problem]:
    if name in ("--cfg", "-c") and value not in ("job", "hydra", "all"):
        yield Problem("", f"{name} {value}".strip(), "it shows one of three configurations", "job, hydra, all")
    elif not value and name not in ("--info", "-i"):
        yield Problem("", name, "its value is missing", remedy=f"write {name} VALUE")


def _unknown_flag(word: str, name: str, value: str, root: type[BaseConfig]) -> Problem:
    """Describe a flag that is a setting, of verl, TRL or OpenRLHF, or nothing; ``value`` is what follows it, if any."""
    known, key = leaves(root), name.replace("-", "_")
    ending = [path for path in known if f".{path}".endswith(f".{key}")] or list(filter(None, [nearest(key, [*known])]))
    remedy = remedy_for(name, yaml.load(value, Loader=yaml_loader()) if value else True, known)
    remedy = remedy or " or ".join(f"{path}={value or 'VALUE'}" for path in ending[:MOST_GUESSES])
    wrong = "settings are written KEY=VALUE, without dashes" if remedy else "there is no such flag"
    return Problem("", word, wrong, remedy=remedy or "--help lists the settings, and --hydra-help the flags")


def override_problems(overrides: Sequence[str], root: type[BaseConfig]) -> list[Problem]:
    """Return the problems of overrides that Hydra cannot read, or that would delete a section below ``root``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, problems = OverridesParser.create(), []
    sections = {key.path for key in iter_keys(root) if key.section is not None}
    for override in overrides:
        key, is_assigned, value = override.partition("=")
        if key.startswith("~") and key[1:].partition("@")[0] in sections:
            wrong = "a section cannot be deleted; it would come back with its defaults"
            remedy = "leave this out: what a run has no use for, such as the critic with grpo, is not started"
            problems.append(Problem("", override, wrong, remedy=remedy))
            continue
        try:
            parser.parse_override(override)
            can_be_read = bool(key.lstrip("+~"))
        except HydraException:
            can_be_read = False
        if can_be_read:
            continue
        if is_assigned and key.lstrip("+~") and key == key.strip():
            wrong = "brackets and quotes do not match, or a special character is not quoted"
            remedy = "quote it twice, once for the shell: KEY=\"'VALUE'\", and lists as KEY=\"['a','b']\""
            problems.append(Problem(key.lstrip("+"), value, wrong, remedy=remedy))
        else:
            wrong, remedy = "a setting is written KEY=VALUE, without spaces", "join key, equals sign and value"
            problems.append(Problem("", override, wrong, remedy=remedy))
    return problems


def keys_set(overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys that overrides set or delete."""
    return {override.partition("=")[0].lstrip("+~") for override in overrides}


def compose(overrides: Sequence[str] = (), config_name: str = "ppo_trainer") -> DictConfig:
    """Compose the configuration as ``python -m verl.trainer... <overrides>`` does, without a command line."""
    import hydra

    prepare_hydra()
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONFIG_DIR)):
        return hydra.compose(config_name, overrides=force_overrides(overrides))


def prepare_hydra() -> None:
    """Let Hydra read YAML files faster, and find those of verl, so that one elsewhere can list them in its defaults.

    Those in ``hydra_defaults`` come before Hydra's own defaults of output folder and logging.
    """
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    use_faster_parsers()

    class VerlSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("verl", "pkg://verl.trainer.config")
            search_path.prepend("verl-hydra", "pkg://verl.trainer.config.hydra_defaults")

    registered = {plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    if VerlSearchPath.__name__ not in registered:
        Plugins.instance().register(VerlSearchPath)


# ---- secrets in the files that Hydra writes ------------------------------------------------------------


def mask_record(cfg: DictConfig) -> None:
    """Mask the secrets in the YAML files that Hydra has just written for this job (and for the sweep)."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    files = [Path(hydra.sweep.dir) / "multirun.yaml"]
    if hydra.output_subdir is not None:
        files += sorted((Path(hydra.runtime.output_dir) / hydra.output_subdir).glob("*.yaml"))
    known = [*secrets_in(OmegaConf.to_container(cfg)), *_overridden(_overrides())]
    for file in files:
        if file.is_file():
            _mask(file, known)


def _overrides() -> list[str]:
    """Return the overrides of this job as text: a ``${...}`` in them refers to the configuration, not to Hydra's."""
    from hydra.core.hydra_config import HydraConfig

    overrides = cast(list[Any], OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))
    return [str(override) for override in overrides]


def _overridden(overrides: Iterable[str]) -> list[str]:
    """Return the secrets that overrides set, parsed as Hydra parses their values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    found: list[str] = []
    for override in overrides:
        name, _, text = override.partition("=")
        try:
            value = parser.parse_override(override).value()
        except HydraException:  # not in Hydra's grammar: take the text itself
            value = text
        found += secrets_in(_nested(name, value))
    return found


def _nested(name: str, value: Any) -> dict[str, Any]:
    """Turn ``a.b`` and a value into ``{"a": {"b": value}}``: a section's name can mark all values below as secret."""
    for part in reversed(name.lstrip("+~").split(".")):
        value = {part: value}
    return value


def _mask(file: Path, known: Iterable[str]) -> None:
    before: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    after = _without(without_secrets(before), list(known))
    if after == before:
        return
    # A reader, or a crash while writing, never meets half a file: the new one replaces the old in one operation.
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    OmegaConf.save(OmegaConf.create(after), unfinished)
    unfinished.replace(file)


def _without(value: Any, known: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, known) for item in value]
    return redacted(value, known) if isinstance(value, str) else value


# ---- the composed configuration, with what it is worth -------------------------------------------------


def remarks(composed: str, root: type[BaseConfig], explicit: Collection[str] = ()) -> str:
    """Return YAML comments about the keys of a composed configuration that would be refused or have no effect.

    Args:
        composed: what ``--cfg`` prints: all of the configuration, or the section that ``# @package NAME`` names.
        root: root section of the command's configuration.
        explicit: keys that the user set on the command line.
    """
    tree: Any = yaml.load(composed, Loader=yaml_loader())
    if package := re.match(r"# @package (\S+)", composed):
        for part in reversed([] if package[1] == "_global_" else package[1].split(".")):
            tree = {part: tree}
    if "hydra" in tree:
        return ""  # --cfg hydra or all
    problems: list[Problem] = []
    *_, told = Translator.of(root, explicit, problems).translate(tree)
    said = [f"refused: {problem}" for problem in problems] + told
    return "".join(f"# {line}\n" for text in said for line in redacted(text, secrets_in(tree)).splitlines())


# ---- the entry point -------------------------------------------------------------------------------


def command(
    run: Callable[[ConfigT], None],
    config_name: str,
    root: type[ConfigT],
    restarts: bool = False,
    data_only: bool = False,
    first_words: str = "",
) -> Callable[[], None]:
    """Make a command line that calls ``run`` with its checked configuration, as ``@hydra.main`` would.

    Modules of ``VERL_USE_EXTERNAL_MODULES`` are imported before the configuration is checked, so that it can name
    what they register. Secrets are masked in the files that Hydra writes. Errors in ``PLAIN_ERRORS`` end the process
    with their text and exit code 2; ``HYDRA_FULL_ERROR=1`` shows the traceback. Ctrl-C ends it with exit code 130.

    Args:
        run: the body of the command.
        config_name: name of the YAML file, without its suffix.
        root: root section of the configuration.
        restarts: call ``run`` in a process that is restarted when a signal kills it; see
            :func:`verl.trainer.driver.restarting_driver`.
        data_only: check only the settings of data and tokenizer.
        first_words: what to tell if no argument is given, for a command whose defaults alone cannot run.
    """

    @interruptible()
    def main() -> None:
        import hydra

        open_closed_streams()
        if {"--help", "-h"}.intersection(sys.argv[1:]):
            _print_help(cast(FunctionType, run), root)
            return

        if first_words and not sys.argv[1:]:
            _end_plainly(ConfigError(first_words), [])
        began = Event()

        def entry(cfg: DictConfig) -> None:
            began.set()
            _show_full_errors(shown_in_full)
            if restarts:  # a training run; others write their result to standard output
                from verl.utils.console import status

                status("checking the configuration")
            mask_record(cfg)
            try:
                with importing():
                    # The checks need torch and transformers, which take seconds; printing the configuration does not.
                    from verl.trainer.config.load import load_config
                    from verl.trainer.driver import restarting_driver

                    prepare_process()
                    config = load_config(cfg, root, keys_set(_overrides()), data_only)
                with restarting_driver(config) if restarts else nullcontext(config) as config:
                    run(config)
            except PLAIN_ERRORS as error:
                _end_plainly(error, secrets_in(OmegaConf.to_container(cfg)), root)
            _show_full_errors("1")  # for the composition of a sweep's next job

        prepare_hydra()
        _, overrides = _parted(sys.argv[1:])  # as written: with flags in front, one would take an override's place
        flags_and_overrides = force_overrides(sys.argv[1:])
        if problems := word_problems(sys.argv[1:], root):
            _end_plainly(ConfigError(report(problems)), [])
        if not any(override.startswith("hydra.job.name=") for override in overrides):
            flags_and_overrides.append(f"hydra.job.name={Path(inspect.getfile(inspect.unwrap(run))).stem}")
        sys.argv[1:] = flags_and_overrides
        start = hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name=config_name)(entry)
        prints = any(argument == "-c" or argument.startswith("--cfg") for argument in flags_and_overrides)
        composed = io.StringIO()
        shown_in_full = os.environ.get(FULL_ERROR)
        _show_full_errors("1")  # so that what is wrong with the YAML files comes here and not to Hydra's traceback
        try:
            with redirect_stdout(composed) if prints else nullcontext(), _errors_of_composition(began, shown_in_full):
                start()
        finally:
            _show_full_errors(shown_in_full)
            gc.freeze()  # Python would look through a million objects for garbage before the process ends
        if prints:
            try:
                said = remarks(composed.getvalue(), root, keys_set(overrides))
            except ConfigError as error:  # a variable of the environment
                _end_plainly(error, [])
            sys.stdout.write(composed.getvalue() + said)

    return main


@contextmanager
def _errors_of_composition(began: Event, shown_in_full: str | None) -> Iterator[None]:
    """Tell in words what goes wrong before the command itself has begun, unless all errors are shown in full."""
    from hydra.errors import HydraException

    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if shown_in_full:
            raise
        sys.stderr.write(f"ConfigError: the configuration cannot be composed: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        if shown_in_full or began.is_set():
            raise
        # Reading a YAML file and making a folder raise the same errors; Hydra's functions tell them apart.
        inside = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        if "load_configuration" in inside:
            sys.stderr.write(f"ConfigError: the configuration cannot be composed: {error}\n")
            raise SystemExit(2) from None
        folder, key = ("this sweep", "hydra.sweep.dir") if "multirun" in inside else ("this run", "hydra.run.dir")
        wrong = f"the folder for {folder}'s settings cannot be made: {error}"
        sys.stderr.write(f"ConfigError: {wrong}. Start where you may write, or set {key}=FOLDER.\n")
        raise SystemExit(2) from None


def _print_help(run: FunctionType, root: type[BaseConfig]) -> None:
    """Describe the command, or the sections and keys that are named after ``--help``."""
    from verl.trainer.config.help import help_page
    from verl.utils.console import console

    after = itertools.dropwhile(lambda argument: argument not in ("--help", "-h"), sys.argv)
    words = [word for word in after if not word.startswith("-") and "=" not in word]
    try:
        page = help_page(run, root, words)
    except ConfigError as error:  # no such section or key
        _end_plainly(error, [])
    console().print(page)


def _end_plainly(error: Exception, secrets: Collection[str], root: type[BaseConfig] | None = None) -> NoReturn:
    """Exit with code 2 and the text of the error alone, unless ``HYDRA_FULL_ERROR`` asks for the traceback.

    With the ``root`` of the configuration, a line follows with the keys behind the arguments that the error names.
    """
    if root is not None and (keys := keys_named(str(error), root)):
        error.add_note(f"On the command line: {', '.join(keys)}")
    if os.environ.get(FULL_ERROR):
        raise error
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    sys.stderr.write(f"{redacted(f'{type(error).__name__}: {error}{notes}', secrets)}\n")
    raise SystemExit(2) from None


def _show_full_errors(value: str | None) -> None:
    """Set or unset the variable by which Hydra lets errors pass rather than print them and end with exit code 1."""
    if value is None:
        os.environ.pop(FULL_ERROR, None)
    else:
        os.environ[FULL_ERROR] = value
