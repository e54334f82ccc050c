"""Dotted keys of a configuration: list them, describe their values, and edit nested dicts by them."""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl.config.base import (
    INACTIVE,
    BaseConfig,
    Meta,
    config_fields,
    defaults_of,
    meta_of,
    named_section_of,
    section_of,
    sentence_of,
)

Tree = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One setting or one section, by its dotted path."""

    path: str
    """Dotted path, such as ``actor_rollout_ref.actor.optim.lr``."""
    owner: type[BaseConfig]
    field: FieldInfo
    meta: Meta
    default: Any
    """Default value in the class, which an interpolation may replace."""
    section: type[BaseConfig] | None
    """Class of the section, if the key is one."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """Sentence that documents the key."""
        stated = sentence_of(self.owner, self.name)
        return stated or (self.section.__doc__ or "").partition("\n")[0] if self.section else stated

    @property
    def takes_null(self) -> bool:
        """True if the key may be null."""
        return types.NoneType in typing.get_args(self.field.annotation)

    @property
    def takes_numbers_only(self) -> bool:
        """True if the key takes a number, or a list of numbers, and no truth value."""
        named = _named_types(self.field.annotation)
        return not named.isdisjoint({int, float}) and bool not in named

    @property
    def takes_text_only(self) -> bool:
        """True if the key takes a text, or a list of texts, and neither numbers nor truth values."""
        named = _named_types(self.field.annotation)
        return str in named and named.isdisjoint({int, float, bool, dict, object, Any})

    @property
    def follows(self) -> bool:
        """True if a default factory, rather than an interpolation, takes the default from another field."""
        return bool(self.field.default_factory_takes_validated_data) and self.meta.interpolation is None

    @cached_property
    def source(self) -> str:
        """Path of the only field from which a default factory takes the default as it is; empty without one."""
        if not self.follows:
            return ""
        values = {name: object() for name in config_fields(self.owner)}
        default = self.field.get_default(call_default_factory=True, validated_data=values)
        name = next((name for name, value in values.items() if value is default), "")
        return self.path.removesuffix(self.name) + name if name else ""

    @cached_property
    def yaml_default(self) -> Any:
        """Default in the YAML file: the interpolation, unless the parent section gives the key a default of its own."""
        if self.meta.missing and self.default is None:
            return "???"
        if named_section_of(self.field) is not None:  # what is in these sections, their own keys say
            return {name: {} for name in self.default}
        usual = self.field.get_default()
        usual = self.default if usual is PydanticUndefined else usual
        if self.meta.interpolation is not None and same(self.default, usual):
            return self.meta.interpolation
        return usual if same(self.default, usual) else self.default


@dataclass(frozen=True)
class InactiveKey:
    """One key that the YAML files contain for older scripts and that no code reads."""

    path: str
    yaml_default: Any
    why: str
    refused: bool
    is_spelling: bool
    """True if the key is another spelling of an active key."""
    per_rank: str | None
    """Path of the key that is derived from this one."""


def iter_keys(root: type[BaseConfig], default: BaseConfig | None = None, prefix: str = "") -> Iterator[Key]:
    """Yield every field below ``root`` in the order of the classes, each section before its fields."""
    default = defaults_of(root) if default is None else default
    for name, field in config_fields(root).items():
        meta = meta_of(field)
        if meta.internal:
            continue
        value, below = getattr(default, name), section_of(field)
        yield Key(prefix + name, root, field, meta, value, below)
        if below is not None:
            yield from iter_keys(below, value, f"{prefix}{name}.")
        elif (named := named_section_of(field)) is not None:
            for own_name, item in value.items():
                yield from _keys_of_named(f"{prefix}{name}.{own_name}", root, named, item)


def _keys_of_named(path: str, owner: type[BaseConfig], section: type[BaseConfig], default: BaseConfig) -> Iterator[Key]:
    yield Key(path, owner, FieldInfo(annotation=section), Meta(), default, section)
    yield from iter_keys(section, default, f"{path}.")


def added_sections(root: type[BaseConfig], settings: Mapping[str, Any]) -> dict[str, Key]:
    """Map dotted path to key, of sections that only the user named (one more teacher): each, and what is below it."""
    added: dict[str, Key] = {}
    known_keys = keys_of(root)
    for path, key in known_keys.items():
        named, items = named_section_of(key.field), get(settings, path)
        if named is None or not isinstance(items, Mapping):
            continue
        for name in items:
            if f"{path}.{name}" not in known_keys and "." not in name:
                section_keys = _keys_of_named(f"{path}.{name}", key.owner, named, defaults_of(named))
                added |= {below.path: below for below in section_keys}
    return added


def inactive_keys(root: type[BaseConfig], prefix: str = "") -> Iterator[InactiveKey]:
    """Yield the inactive keys of one section, without those of its subsections."""
    for cls in reversed(root.__mro__):
        for group in INACTIVE.get(cls, ()):
            per_rank = prefix + group.per_rank if group.per_rank else None
            for path, default in group.keys.items():
                yield InactiveKey(prefix + path, default, group.why, group.refused, group.is_spelling, per_rank)


@functools.cache
def keys_of(root: type[BaseConfig]) -> Mapping[str, Key]:
    """Map dotted path to field, sections too."""
    return MappingProxyType({key.path: key for key in iter_keys(root)})


@functools.cache
def all_inactive(root: type[BaseConfig]) -> Mapping[str, InactiveKey]:
    """Map dotted path to inactive key, over all sections."""
    return MappingProxyType({key.path: key for key in inactive_keys(root)} | inactive_below(keys_of(root)))


def inactive_below(keys: Mapping[str, Key]) -> dict[str, InactiveKey]:
    """Map dotted path to inactive key, of the sections among ``keys``."""
    sections = {key.path: key.section for key in keys.values() if key.section is not None}
    return {key.path: key for path, section in sections.items() for key in inactive_keys(section, f"{path}.")}


def leaves(root: type[BaseConfig]) -> dict[str, Key]:
    """Map dotted path to key, without the sections."""
    return {key.path: key for key in iter_keys(root) if key.section is None}


def _named_types(annotation: object) -> set[object]:
    """Return an annotation and everything that its brackets and unions name."""
    return {annotation}.union(*map(_named_types, typing.get_args(annotation)))


@functools.cache
def _default_tree(root: type[BaseConfig]) -> Tree:
    return default_tree(root, defaults_of(root))


def default_tree(root: type[BaseConfig], default: BaseConfig | None = None) -> Tree:
    """Build the configuration as the YAML files have it, with interpolations, inactive keys, ``_target_``, ``???``."""
    if default is None:
        return plain(_default_tree(root))
    tree: Tree = {}
    target = getattr(root, "hydra_target", None)
    if target is not None:
        tree["_target_"] = target
    for key in iter_keys(root, default):
        if "." in key.path:
            continue
        if key.section is not None and isinstance(key.default, BaseConfig):
            tree[key.name] = default_tree(key.section, key.default)
        elif (named := named_section_of(key.field)) is not None:
            tree[key.name] = {name: default_tree(named, item) for name, item in key.default.items()}
        else:
            tree[key.name] = plain(key.yaml_default)
    for inactive in inactive_keys(root):
        put(tree, inactive.path, plain(inactive.yaml_default))
    return tree


# ---- types and bounds in words ---------------------------------------------------------------------

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def allowed_values(field: FieldInfo) -> str:
    """Describe type and bounds of a field, such as ``an integer >= 1, or null``."""
    parts = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in _SIGNS.items()
        if hasattr(constraint, name)
    ]
    bounds = (" " + " and ".join(parts)) if parts else ""
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    # Literal[...] | None is a typing.Union, int | None a types.UnionType.
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    options = typing.get_args(annotation) if is_union else (annotation,)
    return ", or ".join(_in_words(option) + (bounds if option in (int, float) else "") for option in options)


def _in_words(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        if typing.get_origin(items[0]) is typing.Literal:
            return f"a list of {_in_words(items[0])}"
        kind = typing.get_origin(items[0]) or items[0]
        plural = {int: "integers", float: "numbers", str: "strings", dict: "mappings"}[kind]
        return f"a list of {plural}" if Ellipsis in arguments else f"a list of {len(items)} {plural}"
    if origin is dict:
        return "a mapping"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


# ---- trees of plain values -------------------------------------------------------------------------


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> Tree:
    """Merge ``over`` into a copy of ``base``, section by section."""
    tree: Tree = dict(base)
    for name, value in over.items():
        below = tree.get(name)
        tree[name] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else plain(value)
    return tree


def plain(value: object) -> Any:
    """Convert tuples to lists and mappings to dicts, at every level."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def same(first: object, second: object) -> bool:
    """Compare two settings: a tuple equals a list, a single value a list of one; True does not equal 1."""
    first, second = plain(first), plain(second)
    if isinstance(first, list) != isinstance(second, list):
        first, second = (item if isinstance(item, list) else [item] for item in (first, second))
    return first == second and isinstance(first, bool) == isinstance(second, bool)


_MISSING = object()


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or ``default``."""
    node: Any = tree
    for part in path.split("."):
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else _MISSING
        if node is _MISSING:
            return default
    return node


def put(tree: Tree, path: str, value: object) -> None:
    """Set the value at a dotted path in place, creating missing sections."""
    *parents, name = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[name] = value


def drop(tree: Tree, path: str) -> Any:
    """Remove and return the value at a dotted path, and remove the sections that this leaves empty."""
    parent_path, _, name = path.rpartition(".")
    parent = get(tree, parent_path) if parent_path else tree
    if not isinstance(parent, dict) or name not in parent:
        return None
    value = parent.pop(name)
    if not parent and parent_path:
        drop(tree, parent_path)
    return value


def nearest(path: str, known_paths: list[str]) -> str | None:
    """Return the known key that ``path`` most likely means.

    Candidates in this order: a key that ends in ``path``, a similar name in the same section, the same name in
    another section, a similar path.
    """
    section, _, name = path.rpartition(".")

    def closest(candidates: list[str], cutoff: float) -> str | None:
        return next(iter(difflib.get_close_matches(path, candidates, n=1, cutoff=cutoff)), None)

    siblings = {key.rpartition(".")[2]: key for key in known_paths if key.rpartition(".")[0] == section}
    similar = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    return (
        closest([key for key in known_paths if key.endswith("." + path)], 0.0)
        or (siblings[similar[0]] if similar else None)
        or closest([key for key in known_paths if key.rpartition(".")[2] == name], 0.0)
        or closest(known_paths, 0.75)
    )


# ---- keys that are linked ------------------------------------------------------------------------------

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_SHARED = "ulysses_sequence_parallel_size"

PAIRS: tuple[tuple[str, str], ...] = (
    (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    (f"{_ACTOR}.strategy", f"{_ACTOR}.fsdp_config.strategy"),
    (f"{_REF}.strategy", f"{_REF}.fsdp_config.strategy"),
    ("critic.strategy", "critic.model.fsdp_config.strategy"),
    ("reward_model.strategy", "reward_model.model.fsdp_config.strategy"),
    (f"{_ACTOR}.{_SHARED}", f"{_ACTOR}.fsdp_config.{_SHARED}"),
    (f"{_REF}.{_SHARED}", f"{_REF}.fsdp_config.{_SHARED}"),
    (f"critic.{_SHARED}", f"critic.model.fsdp_config.{_SHARED}"),
    (f"reward_model.{_SHARED}", f"reward_model.model.fsdp_config.{_SHARED}"),
)
"""Pairs of keys for one setting; after loading, both hold the same value. ``${...}`` in defaults is the other way."""

FORWARD_PASSES: tuple[tuple[str, str], ...] = (
    (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{_REF}.log_prob_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    ("reward_model.micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
)
"""Sizes of passes without gradients, each with the one that it takes if it is null: what an update holds, fits."""


# ---- keys that an error means --------------------------------------------------------------------------

# `name=value`, or a name that no English word could be; with the sections that the message gives before it.
_SETTING = re.compile(r"(?<![\w./'-])(?:[a-z]\w*\.)*(?:[a-z]\w*(?==[^=])|[a-z]\w*_\w+)(?![\w/(])")
_MAX_LONGER_NAMES = 4
"""Most keys that may share a name; of names with more, such as ``name``, no key is reported."""


def keys_named(text: str, root: type[BaseConfig]) -> list[str]:
    """Return the keys of a configuration that a message names without their sections, in the order of the message.

    The library names what its caller wrote: the argument of a function, or a key of the section that it was given. On
    the command line the same thing has a longer name, ``data.max_prompt_length`` for ``max_prompt_length``.
    """
    if text.partition("\n")[0].endswith("in the configuration:"):  # a report, which has the whole keys
        return []
    all_paths = keys_of(root).keys()
    paths: dict[str, None] = {}
    for name in dict.fromkeys(_SETTING.findall(text)):
        longer = [path for path in all_paths if path.endswith(f".{name}")]
        if name not in all_paths and len(longer) <= _MAX_LONGER_NAMES and not any(path in text for path in longer):
            paths |= dict.fromkeys(sorted(longer))
    return list(paths)
