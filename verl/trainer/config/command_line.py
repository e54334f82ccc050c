"""Commands: compose the YAML files with Hydra, check the configuration, run, and end with an exit code."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import yaml
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl.base.import_utils import prepare_process
from verl.base.lazy import importing
from verl.base.redact import redacted, secrets_in
from verl.base.streams import open_closed_streams, printable
from verl.config import BaseConfig, PPOConfig, Problem
from verl.config.problems import report
from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    ResourceError,
    RewardError,
    RolloutError,
)
from verl.supervision.interruption import interruptible
from verl.trainer.config.flags import CONFIG_NAMES, Words, read_words
from verl.trainer.config.keys import keys_named
from verl.trainer.config.omegaconf_private import use_faster_parsers
from verl.trainer.config.other_spellings import OTHER_SPELLINGS
from verl.trainer.config.output_folder import output_folder
from verl.trainer.config.overrides import force_overrides, keys_set, settings_of, takes_text
from verl.trainer.config.translate import Translator

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

PLAIN_ERRORS = (ConfigError, DataError, ResourceError, CheckpointError, RewardError, NonFiniteError, RolloutError)
"""Errors caused by the user's settings, data, code or machine; a traceback of verl's code would not help the user."""

VALUES_LATER = "Values, and what depends on them, are checked once these names are right."

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable that asks for tracebacks, as of programs under ``hydra.main``."""


# ---- composition ---------------------------------------------------------------------------------------


def compose(words: Words | Sequence[str] = (), config_name: str = "ppo_trainer") -> DictConfig:
    """Compose the configuration as ``python -m verl.trainer... <words>`` does; plain words are all overrides."""
    root = next((root for root, name in CONFIG_NAMES.items() if name == config_name), PPOConfig)
    composed = _compose(words if isinstance(words, Words) else Words(overrides=[*words]), config_name, root)
    with open_dict(composed):
        del composed["hydra"]
    return composed


def _compose(words: Words, config_name: str, root: type[BaseConfig], job_name: str = "app") -> DictConfig:
    """Compose a configuration, with Hydra's own section."""
    import hydra

    folder, more = words.config_folder, words.more_configs
    use_faster_parsers(functools.partial(takes_text, root=root))
    _find_verls_files(more)
    overrides = force_overrides(words.overrides, root, words.folders)
    with hydra.initialize_config_dir(version_base=None, config_dir=str(folder), job_name=job_name):
        name = words.flags.get("--config-name", config_name)
        os.environ[OTHER_SPELLINGS] = "none"
        try:
            return hydra.compose(name, overrides=overrides, return_hydra_config=True)
        finally:
            del os.environ[OTHER_SPELLINGS]


def _find_verls_files(more: Path | None) -> None:
    """Let Hydra find verl's YAML files, so that one elsewhere can list them in its defaults.

    Those in ``hydra_defaults`` come before Hydra's own defaults of output folder and logging. ``more`` is a further
    folder for the composition that comes next.
    """
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class VerlSearchPath(SearchPathPlugin):
        more: ClassVar[Path | None] = None

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            if self.more is not None:
                search_path.append("command-line", f"file://{self.more}")
            search_path.append("verl", "pkg://verl.trainer.config")
            search_path.prepend("verl-hydra", "pkg://verl.trainer.config.hydra_defaults")

    plugins = {plugin.__name__: plugin for plugin in Plugins.instance().discover(SearchPathPlugin)}
    if VerlSearchPath.__name__ not in plugins:
        Plugins.instance().register(VerlSearchPath)
    cast(type[VerlSearchPath], plugins.get(VerlSearchPath.__name__, VerlSearchPath)).more = more


# ---- the composed configuration, with what it is worth -------------------------------------------------


def _show(composed: DictConfig, words: Words, root: type[BaseConfig]) -> None:
    """Print what ``--cfg`` asks for, with :func:`remarks`.

    Raises:
        ConfigError: it has no section of the name in ``--package``, or a variable of the environment cannot be used.
    """
    from hydra.core.hydra_config import HydraConfig

    HydraConfig.instance().set_config(composed)  # for `${hydra:...}`
    kind, package = words.flags["--cfg"], words.flags.get("--package", "_global_")
    sections = [str(key) for key in composed if kind == "all" or (key == "hydra") == (kind == "hydra")]
    tree = OmegaConf.masked_copy(composed, sections)
    section = tree if package == "_global_" else OmegaConf.select(tree, package)
    if section is None:
        raise ConfigError(f"--package {package}: there is no such section. Leave it out to see all sections.")
    if not isinstance(section, Container):
        sys.stdout.write(f"{section}\n")
        return
    if "--resolve" in words.flags:
        OmegaConf.resolve(section)
    values: Any = OmegaConf.to_container(section)
    if package != "_global_":
        sys.stdout.write(f"# @package {package}\n")
        for part in reversed(package.split(".")):
            values = {part: values}
    comments = remarks(values, root, keys_set(words.overrides)) if kind == "job" else ""
    sys.stdout.write(OmegaConf.to_yaml(section) + comments)


def remarks(composed: Mapping[str, object], root: type[BaseConfig], explicit: Collection[str] = ()) -> str:
    """Return YAML comments about the keys of a composed configuration that would be refused or have no effect.

    Args:
        composed: any part of the configuration, from its root on.
        root: root section of the command's configuration.
        explicit: keys that the user set on the command line.
    """
    problems: list[Problem] = []
    *_, advice = Translator.for_root(root, explicit, problems).translate(composed)
    remark_texts = [f"refused: {problem}" for problem in problems] + advice
    return "".join(f"# {line}\n" for text in remark_texts for line in redacted(text, secrets_in(composed)).splitlines())


# ---- the entry point -----------------------------------------------------------------------------------


def command(
    run: Callable[[ConfigT], None],
    config_name: str,
    root: type[ConfigT],
    restarts: bool = False,
    data_only: bool = False,
    first_words: str = "",
    module: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Make a command line that calls ``run`` with its checked configuration.

    Modules of ``VERL_USE_EXTERNAL_MODULES`` are imported before the configuration is checked, so that it can name
    what they register. Secrets are masked in the files that are written. Errors in ``PLAIN_ERRORS`` end the process
    with their text and exit code 2; ``HYDRA_FULL_ERROR=1`` shows the traceback. Ctrl-C ends it with exit code 130.

    Args:
        run: the body of the command.
        config_name: name of the YAML file, without its suffix.
        root: root section of the configuration.
        restarts: call ``run`` in a process that is restarted when a signal kills it; see
            :func:`verl.trainer.driver.restarting_driver`.
        data_only: check only the settings of data and tokenizer.
        first_words: what to tell if no argument is given, for a command whose defaults alone cannot run.
        module: ``globals()`` of the command's module, by default that of ``run``: its docstring begins with what the
            command does, and its file names the job.

    Returns:
        a function of the arguments, by default those of the process.
    """
    about = cast(FunctionType, run).__globals__ if module is None else module

    def start(composed: DictConfig, words: Words, write_settings: Callable[[], None]) -> None:
        if restarts:  # a training run; others write their result to standard output
            from verl.utils.console import status

            status("checking the configuration")
        settings: Any = OmegaConf.to_container(composed)
        del settings["hydra"]
        try:
            with importing():
                # The checks need torch and transformers, which take seconds; printing the configuration does not.
                from verl.trainer.config.load import load_config
                from verl.trainer.driver import restarting_driver

                prepare_process()
                config = load_config(settings, root, keys_set(words.overrides), data_only)
            with _errors_of_output_folder():
                write_settings()
            with restarting_driver(config) if restarts else nullcontext(config) as config:
                run(config)
        except PLAIN_ERRORS as error:
            _end_plainly(error, secrets_in(settings), root)

    @interruptible()
    def main(arguments: Sequence[str] | None = None) -> None:
        open_closed_streams()
        arguments = sys.argv[1:] if arguments is None else arguments
        if {"--help", "-h"}.intersection(arguments):
            _print_help(about["__doc__"], root, arguments)
            return
        if first_words and not arguments:
            _end_plainly(ConfigError(first_words))
        words = read_words(arguments, root)
        if words.problems:
            _end_plainly(ConfigError(report(words.problems)))
        if "--cfg" not in words.flags:
            _refuse_unknown_keys(words, root)
        with _errors_of_composition():
            composed = _compose(words, config_name, root, Path(about["__file__"]).stem)
            if composed.hydra.mode is not None and composed.hydra.mode.name == "MULTIRUN":
                raise ConfigError(
                    "hydra.mode=MULTIRUN: a command starts one run. Start each run by a separate command."
                )
            if "--cfg" in words.flags:
                _show(composed, words, root)
                return
        try:
            with ExitStack() as job:
                with _errors_of_output_folder():
                    write_settings = job.enter_context(output_folder(composed))
                start(composed, words, write_settings)
        finally:
            gc.freeze()  # Python would look through a million objects for garbage before the process ends

    return main


def _refuse_unknown_keys(words: Words, root: type[BaseConfig]) -> None:
    """End the process with the keys that there are not, the most frequent mistake, before anything is composed."""
    settings = settings_of(words.overrides, words.folders)
    if problems := Translator.for_root(root, keys_set(words.overrides), []).unknown(settings):
        _end_plainly(ConfigError(f"{report(problems)}\n\n{VALUES_LATER}"), secrets_in(settings))


@contextmanager
def _errors_of_composition() -> Iterator[None]:
    """End the process with a sentence where the YAML files, or what refers to them, cannot be read."""
    from hydra.errors import HydraException

    try:
        yield
    except ConfigError as error:
        _end_plainly(error)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        _end_plainly(ConfigError(f"the configuration cannot be composed: {error}"), cause=error)


@contextmanager
def _errors_of_output_folder() -> Iterator[None]:
    """End the process with a sentence where the folder of the run cannot be made."""
    try:
        yield
    except OmegaConfBaseException as error:
        _end_plainly(ConfigError(f"the configuration cannot be composed: {error}"), cause=error)
    except OSError as error:
        cause = f"the folder for this run's settings cannot be made: {error}"
        remedy = "Start where you may write, or set hydra.run.dir=FOLDER."
        _end_plainly(ConfigError(f"{cause}. {remedy}"), cause=error)


def _print_help(says: str, root: type[BaseConfig], arguments: Sequence[str]) -> None:
    """Describe the command, or the sections and keys that are named after ``--help``."""
    from verl.trainer.config.help import help_page
    from verl.utils.console import console

    after = itertools.dropwhile(lambda argument: argument not in ("--help", "-h"), arguments)
    words = [word for word in after if not word.startswith("-") and "=" not in word]
    try:
        page = help_page(says, root, words)
    except ConfigError as error:  # no such section or key
        _end_plainly(error)
    console().print(page)


def _end_plainly(
    error: Exception,
    secrets: Collection[str] = (),
    root: type[BaseConfig] | None = None,
    cause: Exception | None = None,
) -> NoReturn:
    """Exit with code 2 and the text of the error alone, unless ``HYDRA_FULL_ERROR`` asks for the traceback.

    With the ``root`` of the configuration, a line follows with the keys behind the arguments that the error names.
    """
    if root is not None and (keys := keys_named(str(error), root)):
        error.add_note(f"On the command line: {', '.join(keys)}")
    if os.environ.get(FULL_ERROR):
        raise error from cause
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    sys.stderr.write(f"{printable(redacted(f'{type(error).__name__}: {error}{notes}', secrets))}\n")
    raise SystemExit(2) from None
