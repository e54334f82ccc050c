"""The dotted keys of a configuration, read off its classes."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from verl.base_config import BaseConfig, Meta, config_fields, meta_of, sentence_of

Tree = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One key that users can set, or one section."""

    path: str
    """Dotted: ``actor_rollout_ref.actor.optim.lr``."""
    owner: type[BaseConfig]
    field: FieldInfo
    meta: Meta
    default: Any
    """Value where nothing is set, before interpolation."""
    section: type[BaseConfig] | None
    """The class below, if the key is a section."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """What the key means."""
        return sentence_of(self.owner, self.name)

    @property
    def takes_null(self) -> bool:
        """Whether null is a value of the key."""
        return types.NoneType in typing.get_args(self.field.annotation)

    @property
    def follows(self) -> bool:
        """Whether the default is another field's value (and the key has no interpolation that says so)."""
        return bool(self.field.default_factory_takes_validated_data) and self.meta.interpolation is None

    @property
    def yaml_default(self) -> Any:
        """Default as YAML states it: the interpolation, unless the section that holds the key has another default."""
        if self.meta.missing and self.default is None:
            return "???"
        usual = self.field.get_default()
        usual = self.default if usual is PydanticUndefined else usual
        if self.meta.interpolation is not None and same(self.default, usual):
            return self.meta.interpolation
        return usual if same(self.default, usual) else self.default


def iter_keys(
    root: type[BaseConfig], default: BaseConfig | None = None, prefix: str = "", hint: str | None = None
) -> Iterator[Key]:
    """Every key below ``root``, sections before what they hold, in the order of the classes.

    The hint of a section holds for all below it that say nothing of their own.
    """
    default = root() if default is None else default
    for name, field in config_fields(root).items():
        meta = meta_of(field)
        if meta.internal:
            continue
        if not (meta.hint or meta.refuse or meta.refuse_values):
            meta = replace(meta, hint=hint)
        value, below = getattr(default, name), section_of(field)
        key = Key(prefix + name, root, field, meta, value, below)
        yield key
        if below is not None:
            yield from iter_keys(below, value, f"{key.path}.", meta.hint)


def leaves(root: type[BaseConfig]) -> dict[str, Key]:
    """Dotted path → key, without the sections."""
    return {key.path: key for key in iter_keys(root) if key.section is None}


def section_of(field: FieldInfo) -> type[BaseConfig] | None:
    """The section class that a field holds (also an optional one), or None."""
    annotation = field.annotation
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseConfig)), None)


def default_tree(root: type[BaseConfig], default: BaseConfig | None = None) -> Tree:
    """The whole configuration as YAML states it: defaults, interpolations, ``_target_``, ``???``."""
    default = root() if default is None else default
    tree: Tree = {}
    target = getattr(root, "hydra_target", None)
    if target is not None:
        tree["_target_"] = target
    for key in iter_keys(root, default):
        if "." in key.path:
            continue
        if key.section is not None and isinstance(key.default, BaseConfig):
            tree[key.name] = default_tree(key.section, key.default)
        else:
            tree[key.name] = plain(key.yaml_default)
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """``base`` with the values of ``over``, section by section."""
    tree: Tree = dict(base)
    for name, value in over.items():
        below = tree.get(name)
        tree[name] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else plain(value)
    return tree


def plain(value: Any) -> Any:
    """Tuples as lists, mappings as dicts."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def same(one: Any, other: Any) -> bool:
    """Equality across list and tuple, one string and a list of one, True and 1 kept apart."""
    one, other = plain(one), plain(other)
    if isinstance(one, list) != isinstance(other, list):
        one, other = (item if isinstance(item, list) else [item] for item in (one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


_MISSING = object()


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or ``default``."""
    node: Any = tree
    for part in path.split("."):
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else _MISSING
        if node is _MISSING:
            return default
    return node


def put(tree: Tree, path: str, value: Any) -> None:
    """Set the value at a dotted path, making sections on the way."""
    *parents, name = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[name] = value


def drop(tree: Tree, path: str) -> Any:
    """Remove the value at a dotted path, and the sections that this leaves empty; returns it."""
    parent_path, _, name = path.rpartition(".")
    parent = get(tree, parent_path) if parent_path else tree
    if not isinstance(parent, dict) or name not in parent:
        return None
    value = parent.pop(name)
    if not parent and parent_path:
        drop(tree, parent_path)
    return value


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nearest(path: str, known: list[str]) -> str | None:
    """The known key that ``path`` most likely means.

    In order: the same path with its beginning left out, a similar name in the same section, the
    same name elsewhere, a similar path.
    """
    section, _, name = path.rpartition(".")

    def closest(candidates: list[str], cutoff: float) -> str | None:
        return next(iter(difflib.get_close_matches(path, candidates, n=1, cutoff=cutoff)), None)

    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    similar = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    return (
        closest([key for key in known if key.endswith("." + path)], 0.0)
        or (siblings[similar[0]] if similar else None)
        or closest([key for key in known if key.rpartition(".")[2] == name], 0.0)
        or closest(known, 0.75)
    )
