"""Turn composed YAML and overrides into a checked, frozen configuration.

::

    compose ──► names ──► interpolation ──► values ──► derived values ──► types and bounds ──► rules
    (Hydra)     (table)   (${...})          (table)    (derive)           (pydantic)           (sections, rules)

The user gets the problems of names, types and bounds together, once there are none those of the rules, which may only
follow from them, and last those of algorithms, whose registries need PyTorch: most mistakes are reported before that is
imported. The configuration does not change afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from verl.base.redact import redacted, secrets_in
from verl.config import BaseConfig, PPOConfig, Problem, SupervisedConfig
from verl.config.base import config_fields
from verl.config.problems import report, shown
from verl.errors import ConfigError, SectionError
from verl.trainer.config.derive import derive, derive_from_algorithm
from verl.trainer.config.keys import (
    Key,
    Tree,
    all_inactive,
    allowed_values,
    default_tree,
    drop,
    get,
    merged,
    put,
    same,
)
from verl.trainer.config.reward_section import reward_section
from verl.trainer.config.translate import Translator

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=BaseConfig)


def load_config(
    cfg: DictConfig | Mapping[str, Any],
    root: type[ConfigT] = PPOConfig,
    explicit: Collection[str] = (),
    data_only: bool = False,
    with_rules: bool = True,
    with_algorithms: bool = True,
    for_program: bool = False,
    sections: Collection[str] = (),
    reads_data: bool = True,
) -> ConfigT:
    """Check a composed configuration and freeze it.

    Args:
        cfg: the configuration that Hydra composed, or a plain dict with any part of it; the rest has its defaults.
        root: root section of the entry point, such as ``SFTConfig``, or any section by itself.
        explicit: keys that the user set on the command line; a key set to its own default counts as set.
        data_only: check only the rules of data and tokenizer; types and bounds of all keys are checked anyway.
        with_rules: check rules at all; without them files need not exist.
        with_algorithms: derive what follows from the estimator and the loss, which imports PyTorch; only without rules
            may it be left out.
        for_program: the configuration is that of a Python program. It may then have keys and sections of its own, which
            stay in :func:`as_composed`, and those that resemble a known key are logged; ``_target_`` may name a
            subclass of a section's class, and ``algorithm.adv_estimator`` may be null for a program that computes
            advantages itself.
        sections: report only problems of these sections, for a caller that reads no other; empty for all.
        reads_data: check that the files of data exist; a program may have its data elsewhere.

    Raises:
        ConfigError: lists the problems, each with key, value, allowed values and remedy: those of names, types and
            bounds first, once there are none those of the rules, and last those of algorithms, which need PyTorch.
    """
    problems: list[Problem] = []
    translator = Translator.for_root(root, explicit, problems, for_program)
    tree, raw, interpolations, remarks = translator.translate(cfg)
    keys, inactive = translator.keys, translator.inactive
    bad = _no_numbers(tree, raw, keys, problems)
    if not for_program and "algorithm.adv_estimator" in keys and get(tree, "algorithm.adv_estimator") is None:
        cause = "only a program that computes advantages itself may leave out the estimator"
        problems.append(Problem("algorithm.adv_estimator", None, cause, remedy="name one: grpo, gae, rloo, ..."))
    remarks += derive(tree, raw, keys, inactive, explicit, problems, chooses_engine=with_algorithms)
    if "composed" in config_fields(root):
        tree["composed"] = raw
    config, mistyped = _build(tree, raw, root, keys, problems)
    config = _with_subclasses(config, translator.extended, problems)
    _raise(problems, sections, raw, LATER if with_rules else "")
    broken: list[Problem] = []
    if with_rules:
        from verl.trainer.config.rules import broken_rules
        from verl.trainer.config.rules_shared_prompts import without_sharing

        broken = broken_rules(
            without_sharing(config)[0] if isinstance(config, PPOConfig) else config, data_only, reads_data
        )
        broken = [problem for problem in broken if problem.key not in bad | mistyped]
        _raise([problem for problem in broken if not problem.advice], sections, raw, ALGORITHMS_LATER)
    if with_algorithms and "algorithm.adv_estimator" in keys:
        remarks += derive_from_algorithm(tree, explicit, problems)
        config = _with_subclasses(_build(tree, raw, root, keys, problems)[0], translator.extended, problems)
    if with_rules:
        from verl.trainer.config.rules_algorithms import broken_algorithm_rules
        from verl.trainer.config.rules_shared_prompts import without_sharing

        if isinstance(config, PPOConfig):
            config, unshared = without_sharing(config)
            remarks += unshared
        broken += broken_algorithm_rules(config, data_only)
    checked = [problem for problem in broken if problem.key not in bad | mistyped]
    _raise([*problems, *(problem for problem in checked if not problem.advice)], sections, raw)
    if isinstance(config, PPOConfig | SupervisedConfig) and with_rules and not data_only:
        from verl.trainer.config.unused import unused

        remarks += unused(config, raw, keys, interpolations)
    if isinstance(config, PPOConfig) and with_rules and not data_only:
        from verl.trainer.config.rules_asynchronous import described_mode

        remarks += described_mode(config)
    for advice in (*(problem for problem in checked if problem.advice), *remarks):
        logger.warning("%s", advice)
    return config


LATER = "Files, sizes, and what else depends on these settings, are checked once they are right."
ALGORITHMS_LATER = "The algorithm, its losses and rewards are checked once these settings are right."


def _raise(problems: list[Problem], sections: Collection[str], raw: Tree, note: str = "") -> None:
    """Raise ConfigError if there are problems (in ``sections``, if any are named), with ``note`` below them."""
    if sections:
        problems = [problem for problem in problems if problem.key.partition(".")[0] in sections]
    if problems:
        text = "\n\n".join(filter(None, [report(problems), note]))
        raise ConfigError(redacted(text, secrets_in(raw)))


def data_section(config: Any) -> Any:
    """Return the section ``data`` for a data set: as composed, with all keys, for a class of the user's own."""
    return as_composed(config).data if config.data.custom_cls.path else config.data


def as_composed(config: PPOConfig | SupervisedConfig) -> DictConfig:
    """Return a checked configuration in the form in which Hydra composes it.

    It also has the keys that nothing reads, as they were given. What follows from other settings is filled in; sizes
    that count over all ranks are null, those per rank hold.
    """
    tree = merged(default_tree(type(config)), config.composed)
    for key in all_inactive(type(config)).values():
        if key.per_rank:
            put(tree, key.path, None)
    tree = merged(tree, config.to_dict())
    if isinstance(config, PPOConfig):
        loss = config.actor_rollout_ref.actor.policy_loss
        if loss.rollout_correction is not None:
            put(tree, f"{_POLICY_LOSS}.rollout_correction", loss.rollout_correction.to_dict())
        tree |= {"reward": reward_section(tree)}
    view: DictConfig = OmegaConf.create(tree)
    OmegaConf.set_struct(view, True)
    return view


_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"

LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER, SMALLEST_NUMBER = 3.4e38, 1.2e-38
"""Largest and smallest magnitude of an fp32 number, and the largest integer, that a run can compute with."""


def _no_numbers(tree: Tree, raw: Tree, keys: Mapping[str, Key], problems: list[Problem]) -> set[str]:
    """Report truth values and numbers that no run can compute with; use the defaults of their keys, return the keys."""
    bad: set[str] = set()
    for path, key in keys.items():
        value = get(tree, path)
        items = value if isinstance(value, list) else [value]
        numbers = [n for n in items if isinstance(n, (int, float))]
        if key.section is not None:
            continue
        if key.takes_numbers_only and any(isinstance(n, bool) for n in numbers):
            cause = "a number is wanted, and true and false are none"  # pydantic takes them for 1 and 0
        elif not all(map(_fits, numbers)):
            cause = "the arithmetic of a run does not hold such a number"
        else:
            continue
        if not _is_derived(path, raw, key):  # else its source is reported
            numbers_in_range = f"integers up to 2^63 - 1, numbers between {SMALLEST_NUMBER} and {LARGEST_NUMBER}"
            allowed = f"{allowed_values(key.field)}; {numbers_in_range}"
            problems.append(Problem(path, value, cause, allowed=allowed))
        bad.add(path)
        drop(tree, path)
    return bad


def _fits(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    # Numbers that are not finite are of a wrong type; see verl.config.base.
    return value == 0 or not math.isfinite(value) or SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER


def _build(
    tree: Tree, raw: Tree, root: type[ConfigT], keys: Mapping[str, Key], problems: list[Problem]
) -> tuple[ConfigT, set[str]]:
    """Build the typed configuration; report keys of a wrong type or out of bounds, use their defaults, return them."""
    bad: set[str] = set()
    while True:
        try:
            return root.strict(**tree), bad
        except SectionError as error:
            # A field that follows another one fails with it; only the other one is at fault.
            details = [detail for detail in error.details if detail["type"] != "default_factory_not_called"]
            paths = dict.fromkeys(_key_of(detail["loc"], keys) for detail in details)
            set_by_user = [path for path in paths if path not in keys or not _is_derived(path, raw, keys[path])]
            # Two keys of one setting have the same value; only the one that was set is at fault.
            is_set = {
                path: path not in keys or not same(get(raw, path), keys[path].yaml_default) for path in set_by_user
            }
            cause = [get(tree, path) for path in set_by_user if is_set[path]]
            set_by_user = [path for path in set_by_user if is_set[path] or get(tree, path) not in cause]
            for path in set_by_user or paths:
                problems.append(_type_problem(path, get(tree, path), keys.get(path)))
            if paths.keys() <= bad:
                raise
            bad |= paths.keys()
            for path in paths:
                drop(tree, path)


def _with_subclasses(
    config: ConfigT, extended: Mapping[str, tuple[type[BaseConfig], dict[str, object]]], problems: list[Problem]
) -> ConfigT:
    """Put a program's own classes in the place of sections, the innermost first."""
    for path, (cls, added) in sorted(extended.items(), key=lambda item: -item[0].count(".")):
        names = path.split(".")
        above: list[Any] = [config]
        for name in names:
            above.append(above[-1][name])
        try:
            section_object: Any = cls(**{name: above[-1][name] for name in above[-1]}, **added)
        except ConfigError as error:
            problems.append(Problem(f"{path}._target_", f"{cls.__module__}.{cls.__qualname__}", str(error)))
            continue
        for section, name in zip(reversed(above[:-1]), reversed(names), strict=True):
            section_object = dataclasses.replace(section, **{name: section_object})
        config = section_object
    return config


def _is_derived(path: str, raw: Tree, key: Key) -> bool:
    """Return whether the value of a key comes from its default interpolation."""
    return key.meta.interpolation is not None and get(raw, path) == key.meta.interpolation


def _key_of(location: tuple[int | str, ...], keys: Mapping[str, Key]) -> str:
    """Return the longest prefix of pydantic's error location that is a key."""
    parts = [str(part) for part in location]
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in keys), parts[0])


def _type_problem(path: str, value: object, key: Key | None) -> Problem:
    if key is None or key.section is not None:
        cause = "this is a section, it cannot be replaced by a value"
        return Problem(path, value, cause, remedy="set the keys below it")
    default = "" if key.default is None else f", default {shown(key.yaml_default)}"
    return Problem(path, value, "this value cannot be used here", allowed=allowed_values(key.field) + default)
