"""From YAML and command line to a frozen, checked configuration.

::

    compose ──► respell ──► resolve ──► unknown keys, refusals ──► types and bounds ──► cross checks
    (Hydra)     (aliases)   (${...})                               (pydantic)           (validate)

Every step adds to one list of problems; the user sees them all at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from verl.base_config import BaseConfig
from verl.errors import CheckpointError, ConfigError, DataError, ResourceError, RewardError
from verl.trainer.config.aliases import ALIASES, respell
from verl.trainer.config.describe import allowed_values
from verl.trainer.config.estimator import with_sum_pi_squared
from verl.trainer.config.keys import Key, Tree, default_tree, drop, flat, get, iter_keys, merged, nearest, put, same
from verl.trainer.config.overrides import CONFIG_DIR, add_search_path, force_overrides, keys_set
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem, report, shown
from verl.trainer.config.record import mask_record
from verl.trainer.config.rewrite import rewrite
from verl.trainer.config.rollout_correction import with_bypass_mode
from verl.trainer.config.validate import validate
from verl.utils.import_utils import prepare_process
from verl.utils.processes import open_closed_streams
from verl.utils.redact import redacted, secrets_in

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

PLAIN_ERRORS = (ConfigError, DataError, ResourceError, CheckpointError, RewardError)
"""Errors of what a run was given; where in verl's code they were found helps nobody."""


def load_config(
    cfg: DictConfig | Mapping[str, Any],
    root: type[ConfigT] = PPOConfig,
    explicit: Collection[str] = (),
) -> ConfigT:
    """Check a composed configuration and freeze it.

    Args:
        cfg: as Hydra composes it, or any part of it as a plain dict; what is left out has its default.
        root: class of the result: PPOConfig, SFTConfig, GenerationConfig, EvalConfig.
        explicit: keys that were set by hand, so that one set to its default is not taken for unset.

    Raises:
        ConfigError: with every problem there is, each with key, value, allowed values and remedy.
    """
    problems: list[Problem] = []
    given: Any = OmegaConf.to_container(cfg, resolve=False) if OmegaConf.is_config(cfg) else cfg
    raw = merged(default_tree(root), given)
    known = {key.path: key for key in iter_keys(root)}
    _restore_sections(raw, known, problems)
    respell(raw, known, explicit, problems)
    tree = _resolve(raw, known, problems)
    _take_out_dotted(tree, known, problems)
    _take_out_unknown(tree, known, problems)
    _refuse(tree, raw, known, problems)
    _expand_paths(tree, known)
    rewrite(tree, raw, known, explicit, problems)
    config, bad = _build(tree, raw, root, known, problems)
    checked = [problem for problem in validate(config) if problem.key not in bad]
    problems += [problem for problem in checked if not problem.advice]
    if problems:
        raise ConfigError(redacted(report(problems), secrets_in(raw)))
    for advice in checked:
        logger.warning("%s", advice)
    _tell_hints(tree, raw, known)
    return with_sum_pi_squared(with_bypass_mode(config)) if isinstance(config, PPOConfig) else config


def _restore_sections(raw: Tree, known: Mapping[str, Key], problems: list[Problem]) -> None:
    """Put back sections that were overwritten by a value."""
    for path, key in known.items():
        value = get(raw, path, key.yaml_default)
        is_absent = value is None and key.takes_null
        is_section = isinstance(value, Mapping) or same(value, key.yaml_default) or str(value).startswith("${")
        if key.section is not None and not is_section and not is_absent:
            problems.append(_type_problem(path, value, key))
            put(raw, path, default_tree(key.section, key.default) if key.default is not None else None)


def _resolve(raw: Tree, known: Mapping[str, Key], problems: list[Problem]) -> Tree:
    """Replace interpolations by values; one that cannot be resolved becomes a problem and its key's default."""
    config = OmegaConf.create(raw)
    tried: set[str] = set()
    while True:
        try:
            tree: Tree = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
            break
        except OmegaConfBaseException as error:
            path = error.full_key or ""
            if path in tried:
                raise
            tried.add(path)
            if path not in known or not _is_derived(path, raw, known[path]):  # else its source is at fault
                wrong = str(error).splitlines()[0]
                problems.append(Problem(path, get(raw, path), wrong, remedy="name an existing key, or give a value"))
            OmegaConf.update(config, path, known[path].default if path in known else None, merge=False)
    for path, value in list(flat(tree)):
        if value == "???" and path in known:
            put(tree, path, known[path].default)
    return tree


def _take_out_dotted(tree: Tree, known: Mapping[str, Key], problems: list[Problem]) -> None:
    """Remove names with a dot, which only the command line has."""
    sections = ["", *(path for path, key in known.items() if key.section is not None)]
    for path in sections:
        section = get(tree, path) if path else tree
        for name in [name for name in section if "." in name] if isinstance(section, dict) else []:
            remedy = f"write {name.replace('.', ': {')}: ...{'}' * name.count('.')}, section by section"
            problems.append(
                Problem(f"{path}.'{name}'".lstrip("."), section.pop(name), "a name has no dots", "", remedy)
            )


def _take_out_unknown(tree: Tree, known: Mapping[str, Key], problems: list[Problem]) -> None:
    """Remove keys that no section has (each a problem) and ``_target_`` (which the classes know themselves)."""
    spellings = [path for path, key in known.items() if key.section is None] + [alias.old for alias in ALIASES]
    for path, value in list(flat(tree)):
        parent, _, name = path.rpartition(".")
        if name == "_target_" and (parent == "" or (parent in known and known[parent].section is not None)):
            _check_target(path, value, known, problems)
            drop(tree, path)
        elif not _belongs(path, known):
            near = nearest(path, spellings)
            remedy = f"did you mean {near}?" if near else "remove it"
            problems.append(Problem(path, value, "there is no such key", remedy=remedy))
            drop(tree, path)


def _belongs(path: str, known: Mapping[str, Key]) -> bool:
    """Whether ``path`` is a key, or lies inside a key that holds a free dict."""
    while path:
        if path in known:
            return True
        path = path.rpartition(".")[0]
        if path in known and known[path].section is not None:
            return False
    return False


def _check_target(path: str, value: Any, known: Mapping[str, Key], problems: list[Problem]) -> None:
    key = known.get(path.rpartition(".")[0])
    target = getattr(key.section, "hydra_target", None) if key is not None and key.section is not None else None
    if target is not None and value != target:
        problems.append(
            Problem(path, value, "another class cannot be put in place of a section", target, "leave _target_ out")
        )


def _refuse(tree: Tree, raw: Tree, known: Mapping[str, Key], problems: list[Problem]) -> None:
    """Report features that this version lacks and that the configuration asks for."""
    for path, key in known.items():
        if key.section is not None or get(tree, path, key.default) is None:
            continue
        value = get(tree, path)
        asked = _is_set(path, tree, raw, key) and key.meta.refuse
        reason = key.meta.refuse_values.get(str(value)) or asked
        if reason:
            wrong, _, remedy = reason.partition("; ")
            problems.append(Problem(path, value, wrong, remedy=remedy))
            put(tree, path, key.default)


def _is_set(path: str, tree: Tree, raw: Tree, key: Key) -> bool:
    """Whether a key has another value than where nothing is set (a value derived from another key is not set)."""
    return not _is_derived(path, raw, key) and not same(get(tree, path, key.default), key.default)


def _is_derived(path: str, raw: Tree, key: Key) -> bool:
    """Whether a key was left to its interpolation."""
    return key.meta.interpolation is not None and get(raw, path) == key.meta.interpolation


def _expand_paths(tree: Tree, known: Mapping[str, Key]) -> None:
    for path, key in known.items():
        if key.meta.path:
            value = get(tree, path)
            put(tree, path, [expanded(v) for v in value] if isinstance(value, list) else expanded(value))


def expanded(path: Any) -> Any:
    """A path with ``~`` and ``$VARIABLES`` filled in; anything but a string is left alone."""
    return os.path.expanduser(os.path.expandvars(path)) if isinstance(path, str) else path


def _build(
    tree: Tree, raw: Tree, root: type[ConfigT], known: Mapping[str, Key], problems: list[Problem]
) -> tuple[ConfigT, set[str]]:
    """The typed configuration; keys of a wrong type or out of bounds keep their default and are returned too."""
    bad: set[str] = set()
    while True:
        try:
            return root(**tree), bad
        except ValidationError as error:
            # A field that follows another one fails with it; only the other one is at fault.
            details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
            paths = dict.fromkeys(_key_of(detail["loc"], known) for detail in details)
            own = [path for path in paths if path not in known or not _is_derived(path, raw, known[path])]
            for path in own or paths:
                problems.append(_type_problem(path, get(tree, path), known.get(path)))
            if paths.keys() <= bad:
                raise
            bad |= paths.keys()
            for path in paths:
                drop(tree, path)


def _key_of(location: tuple[int | str, ...], known: Mapping[str, Key]) -> str:
    """The longest beginning of pydantic's location that is a key."""
    parts = [str(part) for part in location]
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), parts[0])


def _type_problem(path: str, value: Any, key: Key | None) -> Problem:
    if key is None or key.section is not None:
        return Problem(
            path, value, "this is a section, it cannot be replaced by a value", remedy="set the keys below it"
        )
    default = "" if key.default is None else f", default {shown(key.yaml_default)}"
    return Problem(path, value, "this value cannot be used here", allowed=allowed_values(key.field) + default)


def _tell_hints(tree: Tree, raw: Tree, known: Mapping[str, Key]) -> None:
    """One log line for each reason why settings have no effect here."""
    by_reason: dict[str, list[str]] = {}
    for path, key in known.items():
        if key.section is None and key.meta.hint and _is_set(path, tree, raw, key):
            by_reason.setdefault(key.meta.hint, []).append(path)
    for reason, paths in by_reason.items():
        logger.warning("no effect: %s (%s)", ", ".join(paths), reason)


def hydra_entry(main: Callable[[ConfigT], None], config_name: str, root: type[ConfigT]) -> None:
    """Run ``main`` with the configuration of the command line, as ``@hydra.main`` would.

    Modules of ``VERL_USE_EXTERNAL_MODULES`` are imported first, so that what they register is
    known when the configuration is checked. What Hydra has written about the run is rid of secrets.
    An error whose text says all there is to know (``PLAIN_ERRORS``) ends the process with that text
    and code 2, without a traceback; ``HYDRA_FULL_ERROR=1`` shows it.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    open_closed_streams()

    def entry(cfg: DictConfig) -> None:
        mask_record(cfg)
        try:
            prepare_process()
            main(load_config(cfg, root, keys_set(HydraConfig.get().overrides.task)))
        except PLAIN_ERRORS as error:
            if os.environ.get("HYDRA_FULL_ERROR"):
                raise
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            said = f"{type(error).__name__}: {error}{notes}"
            sys.stderr.write(f"{redacted(said, secrets_in(OmegaConf.to_container(cfg)))}\n")
            raise SystemExit(2) from None

    add_search_path()
    arguments = force_overrides(sys.argv[1:])
    if not any(argument.startswith("hydra.job.name=") for argument in arguments):
        arguments.append(f"hydra.job.name={Path(inspect.getfile(inspect.unwrap(main))).stem}")
    sys.argv[1:] = arguments
    hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name=config_name)(entry)()
