"""Translate the user's keys to fields: move other spellings, refuse unknown keys, remove inactive ones.

Unknown keys of a configuration that a program hands over belong to that program, and are left to it.

Other spellings are moved before ``${...}`` is resolved, so that an interpolation sees a value set under another
spelling. Inactive keys are checked after it, because their resolved values decide.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.base import env
from verl.base.nested import flat
from verl.config import BaseConfig, Problem
from verl.config.base import config_fields
from verl.config.problems import shown
from verl.trainer.config import fully_async, key_releases, key_table, megatron_lora
from verl.trainer.config.interpolations import Interpolations
from verl.trainer.config.key_table import OLD_DEFAULTS, TYPED_FIRST, Alias, Retired
from verl.trainer.config.keys import (
    InactiveKey,
    Key,
    Tree,
    added_sections,
    all_inactive,
    default_tree,
    drop,
    get,
    inactive_below,
    keys_of,
    merged,
    nearest,
    put,
    same,
)
from verl.trainer.config.other_libraries import other_name, remedy_for, similar_name
from verl.trainer.config.other_spellings import drop_unset, other_spellings

_MISSING = object()
UNREAD = "{keys}: only the class of custom_cls reads it, verl has no such key"

ALIASES = (*key_table.ALIASES, *key_releases.ALIASES)
RETIRED = (*key_table.RETIRED, *key_releases.RETIRED)


def _left_alone(key: InactiveKey, interpolations: Interpolations) -> Any:
    """Return the default of an inactive key, its interpolation resolved."""
    if not str(key.yaml_default).startswith("${"):
        return key.yaml_default
    return interpolations.value_of(key.path, key.yaml_default)


def _is_or_is_below(path: str, pattern: str) -> bool:
    if "*" not in pattern:  # most are plain, and fnmatch would compile each of them
        return path == pattern or path.startswith(f"{pattern}.")
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")


@dataclass(frozen=True)
class Translator:
    """Translates the configuration of one entry point; see :meth:`translate`.

    Attributes:
        explicit: keys that the user set on the command line, also those set to their default.
        problems: list to which everything that cannot be used is appended.
        for_program: whether the configuration is that of a Python program, which may have keys of its own.
    """

    root: type[BaseConfig]
    keys: dict[str, Key]
    inactive: dict[str, InactiveKey]
    explicit: Collection[str]
    problems: list[Problem]
    for_program: bool = False
    spelt: dict[str, str] = field(default_factory=dict)
    """Key → the other spelling under which it was set."""
    extended: dict[str, tuple[type[BaseConfig], dict[str, object]]] = field(default_factory=dict)
    """Section → the program's own class of it, by ``_target_``, and the values of the fields that this class adds."""

    @classmethod
    def for_root(
        cls, root: type[BaseConfig], explicit: Collection[str], problems: list[Problem], for_program: bool = False
    ) -> Translator:
        """Make the translator of an entry point from the root section of its configuration."""
        return cls(root, {**keys_of(root)}, {**all_inactive(root)}, explicit, problems, for_program)

    def translate(self, cfg: DictConfig | Mapping[str, object]) -> tuple[Tree, Tree, Interpolations, list[str]]:
        """Translate a composed configuration, or a plain dict with any part of it; the rest has its defaults.

        Returns:
            the configuration with the keys of the sections alone, the same before interpolation and with all keys,
            what resolves interpolations in the latter, and messages about settings without effect.
        """
        settings: Any = OmegaConf.to_container(cfg, resolve=False) if OmegaConf.is_config(cfg) else cfg
        raw = merged(self._defaults_with_added(settings), settings)
        self.names(raw)
        interpolations = Interpolations(raw)
        tree = self._resolved(raw, interpolations)
        return tree, raw, interpolations, self.values(tree, raw, interpolations)

    def unknown(self, settings: Mapping[str, Any]) -> list[Problem]:
        """Return the problems of names in ``settings``, of a command line, that no configuration has.

        It takes a tenth of the time of :meth:`translate`, which needs all other settings and may ask a cluster.
        """
        raw = merged(self._defaults_with_added(settings), settings)
        self.names(raw)
        return [
            self._unknown(path, value)
            for path, value in flat(settings)
            if get(raw, path, _MISSING) is not _MISSING
            and not self._belongs(path)
            and not self._is_target(path)
            and path not in fully_async.MOVED  # keys of another command if the YAML file has its section
            and self._retired(path) is None
        ]

    def _defaults_with_added(self, settings: Mapping[str, Any]) -> Tree:
        """Return the defaults of all sections; sections that only ``settings`` names become known from now on."""
        defaults, added = default_tree(self.root), added_sections(self.root, settings)
        self.keys.update(added)
        self.inactive.update(inactive_below(added))
        for key in added.values():
            if key.section is not None:
                put(defaults, key.path, default_tree(key.section, key.default))
        return defaults

    def names(self, tree: Tree) -> None:
        """Move other spellings to their keys, in place."""
        if self.for_program:
            drop_unset(tree, other_spellings(self.root), self.explicit)
        self._fill_in_unset(tree)
        self._restore_sections(tree)
        if "trainer.v1.trainer_mode" in self.keys:
            fully_async.move_settings(tree, self.explicit, self.problems, self._defaults, self.for_program)
        self._apply_rates(tree)
        self._apply_offloaded_states(tree)
        self._apply_names_of_optimizers(tree)
        self._apply_settings_of_muon(tree)
        self._apply_lora_of_megatron(tree)
        for alias in ALIASES:
            if get(tree, alias.old, _MISSING) is not _MISSING and self._leads_somewhere(alias):
                self._apply(alias, tree)
        for path, (old, now) in OLD_DEFAULTS.items():
            if path in self.keys and get(tree, path) is old:
                put(tree, path, now)
        self._apply_model_engine(tree)
        self._take_from_environment(tree)

    def values(self, tree: Tree, raw: Tree, interpolations: Interpolations) -> list[str]:
        """Remove unknown, retired and inactive keys and ``_target_`` from the resolved ``tree``, in place.

        Args:
            tree: the configuration after interpolation.
            raw: the configuration before interpolation.
            interpolations: those of ``raw``.

        Returns:
            messages about settings without effect, one for each reason.
        """
        if self.for_program:
            self._find_extended(tree)
        self._take_out_dotted(tree)
        by_reason: dict[str, list[str]] = {}
        misspelt: dict[str, str] = {}
        for path, value in list(flat(tree)):
            if not self._belongs(path):
                drop(tree, path)
                if reason := self._judge(path, value, tree, misspelt):
                    by_reason.setdefault(reason, []).append(path)
        self._take_out_entries(tree, by_reason)
        self._take_out_inactive(tree, raw, interpolations, by_reason)
        self._replace_values(tree, raw, by_reason)
        unread_keys = by_reason.pop(UNREAD, [])
        remarks = [f"no effect: {', '.join(paths)} ({reason})" for reason, paths in by_reason.items()]
        remarks += [UNREAD.format(keys=", ".join(unread_keys))] if unread_keys else []
        remark = "the configuration of this program has a key that verl does not read"
        return remarks + [f"{key}: {remark}; did you mean {near}?" for key, near in misspelt.items()]

    def _take_out_entries(self, tree: Tree, by_reason: dict[str, list[str]]) -> None:
        """Remove the entries of free dicts that the releases' engines read and those here do not."""
        for path, key in self.keys.items():
            entries = get(tree, path) if key.name in key_releases.FREE_SECTIONS else None
            if not isinstance(entries, dict):
                continue
            for name in list(entries):
                full = f"{path}.{name}"
                retired = next(
                    (entry for entry in key_releases.FREE_ENTRIES if _is_or_is_below(full, entry.pattern)), None
                )
                if retired is None:
                    continue
                value = entries.pop(name)
                if retired.refused and not self._says_nothing(retired, full, value, tree):
                    self._refuse(full, value, retired.reason)
                elif not retired.refused and not self._says_nothing(retired, full, value, tree):
                    by_reason.setdefault(retired.reason, []).append(full)
                if not entries:
                    put(tree, path, key.default)

    def _take_out_inactive(
        self, tree: Tree, raw: Tree, interpolations: Interpolations, by_reason: dict[str, list[str]]
    ) -> None:
        for path, key in self.inactive.items():
            if key.per_rank:
                continue  # it has an effect: the size per rank is derived from it
            value, written = drop(tree, path), get(raw, path)
            if same(written, key.yaml_default) or same(value, _left_alone(key, interpolations)):
                continue
            if not key.refused:
                by_reason.setdefault(key.why, []).append(path)
            elif value is not None:
                self._refuse(path, value, key.why)

    def _replace_values(self, tree: Tree, raw: Tree, by_reason: dict[str, list[str]]) -> None:
        """Put defaults in the place of values that are not in this version, which are refused or logged."""
        for path, key in self.keys.items():
            value = str(get(tree, path))
            if reason := key.meta.ignore_values.get(value):
                by_reason.setdefault(f"{value}: {reason}", []).append(path)
            elif reason := key.meta.refuse_values.get(value):
                if not str(get(raw, path)).startswith("${"):  # else its source is reported
                    self._refuse(path, get(tree, path), reason)
            else:
                continue
            put(tree, path, key.default)

    def _resolved(self, raw: Tree, interpolations: Interpolations) -> Tree:
        """Resolve ``${...}``; report one that cannot be resolved, and give its key the default."""

        def default(path: str, cause: str) -> Any:
            stated = self.keys.get(path) or self.inactive.get(path)
            if stated is None and self.for_program:
                return None  # the program resolves its own keys
            if stated is None or get(raw, path) != stated.yaml_default:  # else its source is reported
                remedy = "name an existing key, or give a value"
                self.problems.append(Problem(path, get(raw, path), cause, remedy=remedy))
            return self.keys[path].default if path in self.keys else None

        tree = interpolations.resolved(default)
        for path, value in list(flat(tree)):
            if value == "???" and path in self.keys:
                put(tree, path, self.keys[path].default)
        return tree

    def _judge(self, path: str, value: object, tree: Tree, misspelt: dict[str, str]) -> str | None:
        """Report an unknown or retired key; return the reason why a retired key that is not refused has no effect.

        An unknown key of a program is entered in ``misspelt`` if it resembles a known one.
        """
        parent = path.rpartition(".")[0]
        if self._is_target(path):
            target = getattr(self.keys[parent].section, "hydra_target", None) if parent else None
            if target is not None and value != target and not self.for_program:
                cause = "another class cannot be put in place of a section"
                self.problems.append(Problem(path, value, cause, target, "leave _target_ out"))
        elif (retired := self._retired(path)) is not None:
            if self._says_nothing(retired, path, value, tree):
                return None
            if not retired.refused:
                return retired.reason
            self._refuse(path, value, retired.reason)
        elif self.for_program:
            misspelt |= self._resembled(path)
        elif get(tree, f"{parent.partition('.')[0]}.custom_cls.path"):
            misspelt |= self._resembled(path)
            return UNREAD
        else:
            self.problems.append(self._unknown(path, value))
        return None

    def _is_target(self, path: str) -> bool:
        """Return whether a path is the ``_target_`` of a section, or of the whole configuration."""
        parent, _, name = path.rpartition(".")
        return name == "_target_" and (parent == "" or self._is_section(parent))

    def _retired(self, path: str) -> Retired | None:
        return next((entry for entry in RETIRED if _is_or_is_below(path, entry.pattern)), None)

    def _unknown(self, path: str, value: object) -> Problem:
        """Describe a key that there is not, with the key that it most likely means."""
        parent, _, name = path.rpartition(".")
        leaf_paths = self._leaf_paths()
        near = TYPED_FIRST.get(name)
        if near not in leaf_paths or not near.startswith(f"{parent}." if parent else ""):
            near = nearest(path, [*leaf_paths, *(alias.old for alias in ALIASES), *fully_async.MOVED])
        remedy = f"did you mean {near}?" if near else "remove it"
        if near is None and not parent and (similar := similar_name(name)):
            remedy = f"did you mean {similar}? {remedy_for(similar, value, leaf_paths)}"
        other = other_name(name)
        is_bare = other is not None and not parent and other[1].settable(leaf_paths)
        if is_bare or not any(f".{leaf}".endswith(f".{name}") for leaf in leaf_paths):
            remedy = remedy_for(path, value, leaf_paths) or remedy_for(name, value, leaf_paths) or remedy
        return Problem(path, value, "there is no such key", remedy=remedy)

    def _says_nothing(self, retired: Retired, path: str, value: object, tree: Tree) -> bool:
        if retired.part:
            return path not in self.explicit
        usual = (
            get(tree, str(default)[2:-1]) if str(default).startswith("${") else default for default in retired.harmless
        )
        return any(same(value, default) for default in usual)

    # ---- keys and classes of a program ------------------------------------------------------------

    def _resembled(self, path: str) -> dict[str, str]:
        """Map the first unknown name in ``path`` to the known one of its section that it resembles, if there is one."""
        section = ""
        for name in path.split("."):
            here = f"{section}.{name}".lstrip(".")
            if not self._is_section(here):
                siblings = {key.rpartition(".")[2]: key for key in self.keys if key.rpartition(".")[0] == section}
                near = [siblings[match] for match in difflib.get_close_matches(name, siblings, n=1, cutoff=0.85)]
                if section:  # the key may have left out a section in between, as critic.lr does
                    near += [key for key in self.keys if key.startswith(f"{section}.") and key.endswith(f".{name}")]
                return {here: near[0]} if near else {}
            section = here
        return {}

    def _find_extended(self, tree: Tree) -> None:
        """Enter sections whose ``_target_`` is a subclass of the program's, and take out the fields that it adds."""
        for path, key in self.keys.items():
            values = get(tree, path)
            if key.section is None or not isinstance(values, dict) or not isinstance(values.get("_target_"), str):
                continue
            target, usual = values["_target_"], getattr(key.section, "hydra_target", None)
            if target == usual or target in key_releases.TARGETS_ELSEWHERE.get(path, ()):
                continue
            if (cls := self._class_of(f"{path}._target_", target, key.section)) is None:
                continue
            added = config_fields(cls).keys() - config_fields(key.section).keys() - {"_target_"}
            self.extended[path] = cls, {name: values.pop(name) for name in added & values.keys()}

    def _class_of(self, path: str, target: str, section: type[BaseConfig]) -> type[BaseConfig] | None:
        """Return the class that a ``_target_`` names; report one that is not there or is not of this section."""
        module, _, name = target.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            cause = f"it names no class: {error}"
            self.problems.append(Problem(path, target, cause, remedy=f"leave _target_ out, or name {section.__name__}"))
            return None
        if isinstance(cls, type) and issubclass(cls, section):
            return cls if cls is not section else None
        cause = f"{name} is no subclass of {section.__module__}.{section.__name__}, which this section is"
        self.problems.append(Problem(path, target, cause, remedy="derive it from that class, under @section"))
        return None

    def _refuse(self, path: str, value: object, reason: str) -> None:
        cause, _, remedy = reason.partition("; ")
        self.problems.append(Problem(path, value, cause, remedy=remedy))

    def _leaf_paths(self) -> list[str]:
        return [path for path, key in self.keys.items() if key.section is None] + list(self.inactive)

    def _is_section(self, path: str) -> bool:
        return path in self.keys and self.keys[path].section is not None

    def _belongs(self, path: str) -> bool:
        """Return whether ``path`` is a key, or is inside a key that holds a free dict."""
        if path in self.keys:
            return True
        while path and not self._is_section(path):
            if path in self.keys or path in self.inactive:
                return True
            path = path.rpartition(".")[0]
        return False

    def _restore_sections(self, tree: Tree) -> None:
        """Report sections that a value has replaced, and restore their defaults."""
        for path, key in self.keys.items():
            if key.section is None:
                continue
            value = get(tree, path, key.yaml_default)
            is_absent = value is None and key.takes_null
            is_section = isinstance(value, Mapping) or same(value, key.yaml_default) or str(value).startswith("${")
            if not is_section and not is_absent:
                remedy = f"set {path}.path" if f"{path}.path" in self.keys else "set the keys below it"
                cause = "this is a section, it cannot be replaced by a value"
                self.problems.append(Problem(path, value, cause, remedy=remedy))
                put(tree, path, default_tree(key.section, key.default) if key.default is not None else None)

    def _fill_in_unset(self, tree: Tree) -> None:
        """Give keys that are null their defaults in sections that a section ``reward`` beside them replaces."""
        if not isinstance(get(tree, "reward"), Mapping):
            return
        for path, key in {**self.keys, **self.inactive}.items():
            is_replaced = path.partition(".")[0] in key_table.REPLACED_BY_REWARD and path not in self.explicit
            if is_replaced and key.yaml_default is not None and get(tree, path, _MISSING) is None:
                put(tree, path, key.yaml_default)

    def _take_out_dotted(self, tree: Tree) -> None:
        """Remove and report names with dots, which a YAML file can contain."""
        for path in ["", *(path for path, key in self.keys.items() if key.section is not None)]:
            section = get(tree, path) if path else tree
            for name in [name for name in section if "." in name] if isinstance(section, dict) else []:
                remedy = f"write {name.replace('.', ': {')}: ...{'}' * name.count('.')}, section by section"
                shown_path = f"{path}.'{name}'".lstrip(".")
                self.problems.append(Problem(shown_path, section.pop(name), "a name has no dots", "", remedy))

    def _take_from_environment(self, tree: Tree) -> None:
        """Fill in what ``VERL_SEED`` and ``VERL_FULL_DETERMINISM`` say, where the configuration has its default."""
        values: Tree = {}
        if env.full_determinism():
            values = {path: True for path in self.keys if path.endswith(".full_determinism")}
        if (seed := env.seed()) is not None and "trainer.seed" in self.keys:
            values["trainer.seed"] = seed
        for path, value in values.items():
            if path not in self.explicit and same(get(tree, path), self.keys[path].yaml_default):
                put(tree, path, value)

    # ---- settings of the releases that stand for several keys, or for another one ------------------

    def _apply_model_engine(self, tree: Tree) -> None:
        """Let ``model_engine`` choose the back end of every model; report a section that chooses another.

        In the supervised trainers, settings of ``engine`` are Megatron's, where it has them, with
        ``engine.strategy=megatron``.
        """
        engine = get(tree, "model_engine")
        if engine in ("megatron", "veomni") and "model_engine" in self.keys:
            for path in ("actor_rollout_ref.actor.strategy", "critic.strategy", "reward_model.strategy"):
                value = get(tree, path)
                if value == engine:
                    continue
                if path in self.explicit or not same(value, self.keys[path].yaml_default):
                    cause = f"model_engine={engine} is the back end of all models"
                    self.problems.append(Problem(path, value, cause, str(engine), "keep one of the two settings"))
                put(tree, path, engine)
        self._apply_sections_of_veomni(tree)
        if get(tree, "engine.strategy") == "megatron" and "megatron.strategy" in self.keys:
            for name in ("param_offload", "optimizer_offload", "dtype", "seed"):
                value = get(tree, f"engine.{name}")
                if not same(value, self.keys[f"engine.{name}"].yaml_default):
                    self._move(tree, f"engine.{name}", f"megatron.{name}", value)
                    put(tree, f"engine.{name}", self.keys[f"engine.{name}"].yaml_default)

    def _apply_sections_of_veomni(self, tree: Tree) -> None:
        """Move settings of a section ``veomni`` that ``strategy=veomni`` reads to FSDP's, beside which it stands."""
        actors = get(tree, "actor_rollout_ref.actor.strategy")
        for section, fsdp in key_releases.SECTIONS_OF_VEOMNI.items():
            strategy = get(tree, f"{section}.strategy")
            if strategy != "veomni" and (strategy != "${actor_rollout_ref.actor.strategy}" or actors != "veomni"):
                continue
            for name, (key, default) in key_releases.SETTINGS_OF_VEOMNI.items():
                value = get(tree, f"{section}.veomni.{name}")
                if value is None:
                    continue
                drop(tree, f"{section}.veomni.{name}")
                if not same(value, default):
                    self._move(tree, f"{section}.veomni.{name}", f"{fsdp}.{key}", value)

    def _apply_rates(self, tree: Tree) -> None:
        """Turn the rates at which a schedule begins and ends into their shares of ``lr``."""
        names = {"min_lr": "min_lr_ratio", "lr_warmup_init": "init_lr_ratio"}
        for key, ratio_key in (
            (f"{optim}.{a}", f"{optim}.{b}") for optim in key_releases.OPTIMIZERS for a, b in names.items()
        ):
            if ratio_key not in self.keys or (value := get(tree, key, _MISSING)) is _MISSING:
                continue
            drop(tree, key)
            rate = get(tree, f"{key.rpartition('.')[0]}.lr")
            if not value:
                continue
            try:
                ratio = float(value) / float(rate)
            except (TypeError, ValueError, ZeroDivisionError):
                remedy = f"set {ratio_key}, its share of lr"
                self.problems.append(Problem(key, value, f"it is no share of lr={shown(rate)}", "", remedy))
                continue
            self._move(tree, key, ratio_key, ratio)

    def _apply_names_of_optimizers(self, tree: Tree) -> None:
        """Turn megatron-core's names of optimizers into those of ``torch.optim``."""
        for key in (f"{optim}.optimizer" for optim in key_releases.OPTIMIZERS):
            name = get(tree, key)
            if key in self.keys and isinstance(name, str) and name in key_releases.NAMES_OF_OPTIMIZERS:
                put(tree, key, key_releases.NAMES_OF_OPTIMIZERS[name])

    def _apply_settings_of_muon(self, tree: Tree) -> None:
        """Move settings of Muon to the arguments of PyTorch's class."""
        for optim in (optim for optim in key_releases.OPTIMIZERS if get(tree, f"{optim}.optimizer") == "Muon"):
            section = f"{optim}.override_optimizer_config"
            entries = get(tree, section) or {}
            if not isinstance(entries, Mapping):
                continue  # its type is checked like that of every key
            arguments = dict(entries)
            for name, argument in key_releases.SETTINGS_OF_MUON.items():
                if (value := drop(tree, f"{optim}.{name}")) is not None:
                    arguments.setdefault(argument, value)
            key = f"{optim}.muon_match_adamw_update_rms"
            if matches := drop(tree, key):
                arguments.setdefault("adjust_lr_fn", "match_rms_adamw")
            elif matches is not None and "adjust_lr_fn" not in arguments:
                cause = "updates of Muon have the size of AdamW's unless adjust_lr_fn says otherwise"
                remedy = f"set it to true, or {section}.adjust_lr_fn"
                self.problems.append(Problem(key, matches, cause, remedy=remedy))
            if arguments:
                put(tree, section, arguments)

    def _apply_offloaded_states(self, tree: Tree) -> None:
        """Turn ``optimizer_cpu_offload`` and the fraction beside it into ``offload_fraction``."""
        switch, *fractions = "optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction"
        for optim in key_releases.OPTIMIZERS:
            section = f"{optim}.override_optimizer_config"
            entries = get(tree, section)
            if f"{optim}.offload_fraction" not in self.keys or not isinstance(entries, Mapping):
                continue
            offload_settings = {name: entries[name] for name in (switch, *fractions) if name in entries}
            if switch not in offload_settings:
                continue
            for name in offload_settings:
                drop(tree, f"{section}.{name}")
            if not offload_settings[switch]:
                continue
            fraction = next(
                (offload_settings[name] for name in fractions if offload_settings.get(name) is not None), 1.0
            )
            self._move(tree, f"{section}.{switch}", f"{optim}.offload_fraction", fraction)

    def _apply_lora_of_megatron(self, tree: Tree) -> None:
        """Move ``model.lora.rank`` and what stands beside it to ``model.lora_rank`` and its neighbours."""
        for section in megatron_lora.SECTIONS:
            lora = get(tree, f"{section}.lora")
            if f"{section}.lora_rank" not in self.keys or not isinstance(lora, Mapping):
                continue
            if rank := lora.get("rank"):
                settings, problems = megatron_lora.settings_of(section, get(tree, f"{section}.path"), lora)
                self.problems.extend(problems)
            for name, default in {"rank": 0, **megatron_lora.DEFAULTS}.items():
                if rank or name not in lora or same(lora[name], default):
                    drop(tree, f"{section}.lora.{name}")
            for key, value in settings.items() if rank else ():
                self._move(tree, megatron_lora.spelling_of(key), key, value)

    # ---- other spellings ------------------------------------------------------------------------

    def _leads_somewhere(self, alias: Alias) -> bool:
        """Return whether this entry point has the key; spellings for other entry points are ignored."""
        new = alias.new.partition("[")[0]
        if alias.only_with and alias.only_with not in self.keys:
            return False
        return any(key == new or key.startswith(new + ".") or new.startswith(key + ".") for key in self._leaf_paths())

    def _apply(self, alias: Alias, tree: Tree) -> None:
        """Move the value under ``alias.old``, or all values if it is a section of keys."""
        setting = get(tree, alias.old)
        target = self.keys.get(alias.new)
        takes_keys = target is None or target.section is not None or isinstance(target.default, Mapping)
        if self.for_program and isinstance(setting, Mapping) and not takes_keys:
            return  # a section of the program, which happens to have the name of another spelling
        by_key = takes_keys and isinstance(setting, Mapping)
        values = {f".{below}": value for below, value in flat(setting)} if by_key else {"": setting}
        for below, value in values.items():
            old, new = alias.old + below, alias.new + below
            if below.endswith("._target_") or (alias.silent is not None and same(value, alias.silent)):
                drop(tree, old)  # a section has its own class; what is not set says nothing
                continue
            defaults = self._defaults(old)
            if get(tree, alias.new) == f"${{{alias.old}}}":  # it names the other spelling, and so says the same
                drop(tree, alias.new)
            drop(tree, old)
            if defaults:
                put(tree, old, defaults[0])
            if value is not None and value != {} and not any(same(value, default) for default in defaults):
                value = alias.values.get(value, value) if isinstance(value, str) else value
                self._move(tree, old, new, value, may_differ=bool(alias.only_with))

    def _move(self, tree: Tree, old: str, new: str, value: object, may_differ: bool = False) -> None:
        """Put the value of a spelling at its key, unless that has another one already.

        With ``may_differ`` the YAML file may give the key another default than its class.
        """
        key, _, index = new.removesuffix("]").partition("[")
        if get(tree, key) == f"${{{old}}}":  # it names the other spelling, and so says the same
            drop(tree, key)
        if above := self._value_above(tree, key):
            cause = f"it belongs below {above}, which is set to {shown(get(tree, above))}"
            self.problems.append(Problem(old, value, cause, remedy=f"write all keys of {above} below it, one by one"))
            return
        items = get(tree, key)
        now = items[int(index)] if index else items
        defaults = self._defaults(key) or (None,)
        is_set = key in self.explicit or (
            not index and not may_differ and not any(same(now, default) for default in defaults)
        )
        if (new in self.spelt or is_set) and not same(now, value):
            cause = f"this is another spelling of {self.spelt.get(new, new)}, which is set to {shown(now)}"
            self.problems.append(Problem(old, value, cause, remedy=f"keep one of the two, best {new}"))
            return
        self.spelt[new] = old
        if index:
            value = [value if position == int(index) else item for position, item in enumerate(items)]
        put(tree, key, value)

    def _value_above(self, tree: Tree, key: str) -> str | None:
        """Return the section of a key in whose place there is a value; null there is replaced by an empty section."""
        parts = key.split(".")
        for path in (".".join(parts[:count]) for count in range(1, len(parts))):
            section = get(tree, path, {})
            if section is None:
                put(tree, path, {})
            elif not isinstance(section, Mapping):
                return path
        return None

    def _defaults(self, path: str) -> tuple[object, ...]:
        """Return the values that an unset key can hold (as in YAML, as in the class); empty if there is no such key."""
        if path in self.inactive:
            return (self.inactive[path].yaml_default,)
        key = self.keys.get(path)
        return () if key is None or key.section is not None else (key.yaml_default, key.default)
