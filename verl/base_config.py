"""What every section of the configuration is: typed, frozen, documented field by field.

A section is a class under ``@section`` that derives from ``BaseConfig``. Each field has a type, a
default, where it makes sense a bound, and one sentence below it; YAML, documentation, the list of
known keys and the refusals are all made from these classes, so a default is written down once.

    @section
    class ClipConfig(BaseConfig):
        '''Trust region of the surrogate.'''

        low: float = setting(0.2, ge=0, lt=1)
        '''How far the ratio may fall below 1.'''
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from verl.utils.redact import without_secrets

T = TypeVar("T")

_RULES = ConfigDict(extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True)
_META = "verl"


class BaseConfig(Mapping[str, Any]):
    """A section: read its fields as ``cfg.lr``, ``cfg["lr"]`` or ``cfg.get("lr", default)``.

    Frozen: after loading nobody writes. ``dataclasses.replace(cfg, lr=...)`` makes a changed copy.
    """

    def __getitem__(self, key: str) -> Any:
        if key not in config_fields(type(self)):
            raise KeyError(f"{type(self).__name__} has no field '{key}'; it has {', '.join(self)}.")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(config_fields(type(self)))

    def __len__(self) -> int:
        return len(config_fields(type(self)))

    def __repr__(self) -> str:
        fields = (f"{name}={self._shown(name)!r}" for name in self)
        return f"{type(self).__name__}({', '.join(fields)})"

    def _shown(self, name: str) -> Any:
        """A field's value without secrets; sections below say themselves what they show."""
        value = getattr(self, name)
        return value if isinstance(value, BaseConfig) else without_secrets({name: value})[name]

    def to_dict(self) -> dict[str, Any]:
        """The section and all below it as plain dicts, lists and scalars (for trackers and json)."""
        return {
            name: _plain(getattr(self, name)) for name in self if not meta_of(config_fields(type(self))[name]).internal
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a field is beyond its type and bounds."""

    interpolation: str | None = None
    """The YAML default, where it is derived from other keys; the class default is its last resort."""
    refuse: str | None = None
    """Why no value but the default can be used in this version, and what to do instead."""
    refuse_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same for single values: value → reason and remedy."""
    hint: str | None = None
    """Who uses a setting that changes no result here; the loader says so when it is set."""
    missing: bool = False
    """The YAML default is ``???``: there is no sensible value until the feature is used."""
    internal: bool = False
    """Filled in by code between sections; not a key that users can set."""
    path: bool = False
    """A file or folder: loading expands ``~`` and ``$VARIABLES``."""


def setting(default: Any = dataclasses.MISSING, *, factory: Callable[..., Any] | None = None, **about: Any) -> Any:
    """A field of a section.

    Args:
        default: its default; every section can be built without arguments.
        factory: makes the default instead; may take the dict of the fields before it.
        about: fields of ``Meta``, and bounds for pydantic (``ge``, ``gt``, ``le``, ``lt``).
    """
    meta = Meta(**{field.name: about.pop(field.name) for field in dataclasses.fields(Meta) if field.name in about})
    extra: dict[str, Any] = {_META: dataclasses.asdict(meta)}
    if factory is not None:
        return Field(default_factory=factory, json_schema_extra=extra, **about)
    return Field(default, json_schema_extra=extra, **about)


def subsection(cls: Callable[[], Any], **meta: Any) -> Any:
    """A field that holds a section of its own, by default ``cls()``."""
    return setting(factory=cls, **meta)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Class decorator: frozen, keyword-only, validated, unknown fields refused."""
    return pydantic_dataclass(frozen=True, kw_only=True, repr=False, config=_RULES)(cls)  # type: ignore[return-value]


def config_fields(cls: type) -> Mapping[str, FieldInfo]:
    """Field name → pydantic's description of it, in the order of the class."""
    return cls.__pydantic_fields__  # type: ignore[attr-defined]


def meta_of(field: FieldInfo) -> Meta:
    """The ``Meta`` of a field (an empty one, if it was declared without ``setting``)."""
    extra = field.json_schema_extra
    return Meta(**extra[_META]) if isinstance(extra, dict) and _META in extra else Meta()  # type: ignore[arg-type]


def sentence_of(cls: type, name: str) -> str:
    """The sentence below a field, also when a parent class declares it."""
    for owner in cls.__mro__:
        field = getattr(owner, "__pydantic_fields__", {}).get(name)
        if field is not None and field.description:
            return " ".join(field.description.split())
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, BaseConfig):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OneOrMany = BeforeValidator(_one_or_many)
"""For ``Annotated[tuple[str, ...], OneOrMany]``: one string stands for a list of one."""
