"""Base class and decorators of configuration sections, and the declaration of their fields.

A section is a class under ``@section`` that derives from ``BaseConfig``. Each field has a type, a default, bounds
where they make sense, and one sentence below it. The YAML files, docs/configuration, the list of known keys and
the error messages are made from these classes, so a default is written once.

    @section
    class ClipConfig(BaseConfig):
        '''Trust region of the surrogate.'''

        low: float = setting(0.2, ge=0, lt=1)
        '''How far the ratio may fall below 1.'''
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import keyword
import logging
import operator
import sys
import types
import typing
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

from omegaconf import DictConfig
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.dataclasses import rebuild_dataclass
from pydantic.fields import FieldInfo

from verl.base.fs import copy_to_local
from verl.base.redact import without_secrets
from verl.base.registry import suggest
from verl.base.remote import expand, is_remote
from verl.config.problems import Problem
from verl.errors import SectionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
SectionT = TypeVar("SectionT", bound="BaseConfig")

# Numbers are turned into strings where a string is wanted: YAML reads experiment_name=7 as a number.
_RULES = ConfigDict(
    extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True
)
# What validates a section of ours is built when one is validated: `--help`, `--cfg job` and `verl explain` read fields
# and defaults alone. One of a user's may go to other processes by value, which takes what is built.
_OUR_RULES = _RULES | ConfigDict(defer_build=True)
_META = "verl"


@dataclasses.dataclass(frozen=True)
class Inactive:
    """Keys of a section that no code reads, with one reason.

    Attributes:
        why: ``reason; remedy`` of a refusal, or the reason why a setting has no effect.
        keys: dotted key below the section → its default in the YAML files (a value or an interpolation).
        refused: whether another value is an error.
        is_spelling: whether the keys are other spellings, of the keys given in ``ALIASES`` or ``per_rank``.
        per_rank: key per rank that is derived from these keys, which count over all ranks.
        new_name: field of the same section that these keys are another name of.
    """

    why: str
    keys: Mapping[str, object]
    refused: bool = False
    is_spelling: bool = False
    per_rank: str | None = None
    new_name: str | None = None


INACTIVE: dict[type[BaseConfig], tuple[Inactive, ...]] = {}
"""Section → its inactive keys, which its subclasses have too; :mod:`verl.config.inactive` fills it."""
KEYWORDS: dict[type[BaseConfig], tuple[Inactive, ...]] = {}
"""Section → keywords of the public constructor that are no keys; filled there too."""


class _SectionType(ABCMeta):
    """Metaclass of sections: their constructors take the keywords of the public classes of the same name."""

    if not TYPE_CHECKING:  # otherwise type checkers would not see the fields

        def __call__(cls, *args: object, **values: object) -> object:
            if is_section(cls):
                fields = config_fields(cls)  # of a plain dataclass they exist from here on
                values = {cls.key_of_field.get(name, name): value for name, value in values.items()}
                for name in [name for name, value in values.items() if value is None and _null_is_default(cls, name)]:
                    del values[name]
                if other_names := values.keys() - fields.keys():
                    _take_inactive(cls, values, other_names)
                for name in values.keys() & fields.keys():
                    below, named = section_of(fields[name]), named_section_of(fields[name])
                    if named is not None and type(values[name]) is dict:
                        values[name] = {key: _made_by(named, item) for key, item in values[name].items()}
                    elif below is not None:
                        values[name] = _made_by(below, values[name])
            return cls.strict(*args, **values)

    def strict(cls, *args: object, **values: object) -> Any:
        """Make the section of its own fields alone, where a null section is an error.

        Raises:
            SectionError: a value has the wrong type or is out of bounds.
        """
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            details = error.errors()
            # A factory is not called when another field, which it reads, has failed.
            user_errors = [detail for detail in details if detail["type"] != "default_factory_not_called"]
            cause = (
                f"{'.'.join(map(str, detail['loc']))}={detail['input']!r:.80}: {detail['msg']}"
                for detail in user_errors
            )
            raise SectionError(f"{cls.__name__} cannot be made: {'; '.join(cause)}.", details) from error


def _made_by(cls: type[BaseConfig], values: object) -> object:
    """Return the section of a dict, made by its class, which takes public keywords; anything else unchanged."""
    return cls(**{key: value for key, value in values.items() if key != "_target_"}) if type(values) is dict else values


def _null_is_default(cls: type[BaseConfig], name: str) -> bool:
    """Return whether public constructors take null for the default: for a section, and where ``KEYWORDS`` says so."""
    field = config_fields(cls).get(name)
    if field is None:
        return False
    stated = (group.keys for base in cls.__mro__ for group in KEYWORDS.get(base, ()))
    return field.annotation is section_of(field) or any(keys.get(name, ANY) is None for keys in stated)


def _take_inactive(cls: type[BaseConfig], values: dict[str, object], names: Collection[str]) -> None:
    """Take ``others``, keywords that are no fields, out of ``values``, and refuse those that would have an effect."""
    table = [group for base in cls.__mro__ for part in (KEYWORDS, INACTIVE) for group in part.get(base, ())]
    for name in sorted(names):
        groups = [group for group in table if any(key.split(".")[0] == name for key in group.keys)]
        if not groups:
            allowed = [*config_fields(cls), *(key for group in table for key in group.keys if "." not in key)]
            raise SectionError(
                f"{cls.__name__} has no '{name}'.{suggest(name, allowed)} It has {', '.join(sorted(allowed))}."
            )
        value, group = values.pop(name), groups[0]
        default = group.keys.get(name)
        if _is_off(value) or value == default or (isinstance(default, str) and default.startswith("${")):
            continue
        if group.new_name is not None:
            values[group.new_name] = value
        elif group.per_rank is not None:
            raise SectionError(
                f"{cls.__name__}.{name}={value!r} counts sequences over all ranks, which a section by itself does not "
                f"know. Set {group.per_rank}, sequences on one rank."
            )
        elif group.refused:
            raise SectionError(f"{cls.__name__}.{name}={value!r:.80} is not possible: {group.why}.")
        elif default is not ANY:
            logger.warning("%s.%s=%.80r has no effect: %s", cls.__name__, name, value, group.why)


def _is_off(value: object) -> bool:
    """Return whether a value switches nothing on: null, false, nothing in it, or a section with ``enable=false``."""
    if isinstance(value, Mapping) and value:
        return not value.get("enable", value.get("enabled", True))
    return value is None or value is False or (isinstance(value, Sized) and len(value) == 0)


ANY = object()
"""Default of a keyword whose value is of no interest."""


class BaseConfig(Mapping[str, Any], metaclass=_SectionType):
    """A section: read its fields as ``cfg.lr``, ``cfg["lr"]`` or ``cfg.get("lr", default)``.

    Sections are frozen; a value that is derived from several fields is a property with a name of its own. A subclass of
    a section is under ``@section`` too, or under the ``@dataclass`` of the standard library.
    """

    key_of_field: ClassVar[Mapping[str, str]] = {}
    """Key of each field whose key is a keyword of Python: ``async`` of the field ``async_``."""

    def __post_init__(self) -> None:
        """Do nothing; the ``__post_init__`` of a program's subclass may call it."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Convert a mapping with any part of this section; its other keys have no effect.

        Of a plain mapping these are logged. A composed section has some always, which loading has judged.

        Raises:
            ConfigError: a value has the wrong type or is out of bounds.
        """
        if isinstance(values, cls):
            return values
        fields = config_fields(cls)
        field_values = {name: _of_type(fields[name], values[name]) for name in values if name in fields}
        other_keys = sorted(map(str, set(values) - set(field_values)))
        if other_keys and not isinstance(values, DictConfig):
            logger.warning("%s has no %s; what these keys say has no effect", cls.__name__, ", ".join(other_keys))
        return cls(**field_values)

    if not TYPE_CHECKING:  # otherwise type checkers would accept misspelled names, and assignments
        # Not by frozen dataclasses, which plain ones cannot extend.
        def __setattr__(self, name: str, value: object) -> None:
            if is_section(type(self)):
                raise dataclasses.FrozenInstanceError(f"cannot assign to field '{name}'")
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if is_section(type(self)):
                raise dataclasses.FrozenInstanceError(f"cannot delete field '{name}'")
            super().__delattr__(name)

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__} has no '{name}': settings of unsupported features are not stored. If a "
                f"default is enough, write .get('{name}', default)."
            )

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

    def _shown(self, name: str) -> object:
        """Return a field's value without secrets; subsections mask their own."""
        value = getattr(self, name)
        return value if isinstance(value, BaseConfig) else without_secrets({name: value})[name]

    def problems(self, path: str) -> Iterator[Problem]:
        """Yield problems of the section's own fields, beyond types and bounds; sections override this.

        Rules that involve several sections are in :mod:`verl.trainer.config.rules`.

        Args:
            path: dotted path of the section for messages, such as ``actor_rollout_ref.actor``.
        """
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """Convert the section to plain dicts, lists and scalars (for trackers and JSON), without internal fields."""
        return {
            name: _plain(getattr(self, name)) for name in self if not meta_of(config_fields(type(self))[name]).internal
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """Properties of a field beyond its type and bounds."""

    interpolation: str | None = None
    """Default in the YAML files, derived from other keys; the class default applies where it cannot be resolved."""
    refuse_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values that cannot be used in this version: value → ``reason; remedy``."""
    ignore_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values in whose place the default is used, which is logged: value → reason."""
    missing: bool = False
    """The YAML default is ``???``: there is no sensible value until the feature is used."""
    internal: bool = False
    """Filled in by code; not a key that users can set."""
    path: bool = False
    """A file or folder: loading expands ``~`` and ``$VARIABLES``."""
    remote: bool = False
    """A path that may be a URL; what reads it, in each process, takes the copy of :func:`local_copies`."""


_NO_META = Meta()
INTERNAL: Mapping[str, object] = {"json_schema_extra": {_META: Meta(internal=True)}}
"""Metadata of an internal field that is declared by ``dataclasses.field``."""


def setting(default: Any = dataclasses.MISSING, *, factory: Callable[..., object] | None = None, **about: Any) -> Any:
    """Declare a field of a section.

    Args:
        default: the default value; every section must be constructible without arguments.
        factory: makes the default instead; may take a dict with the values of the fields declared before.
        about: fields of ``Meta``, bounds for pydantic (``ge``, ``gt``, ``le``, ``lt``), and ``alias``, the key of a
            field whose key is a keyword of Python.
    """
    meta = Meta(**{field.name: about.pop(field.name) for field in dataclasses.fields(Meta) if field.name in about})
    extra: dict[str, Any] = {_META: meta}
    if factory is not None:
        return Field(default_factory=factory, json_schema_extra=extra, **about)
    return Field(default, json_schema_extra=extra, **about)


def subsection(cls: type[SectionT], **changes: object) -> Any:
    """Declare a field that holds a section: by default that of the class, with ``changes`` of its fields."""
    # Not functools.partial: to see that no argument is taken, pydantic would work out the signature of what is wrapped.
    return setting(factory=lambda: defaults_of(cls, **changes))


def defaults_of(cls: type[SectionT], **changes: object) -> SectionT:
    """Make a section of its defaults and ``changes``; those of sections of verl's own are not validated."""
    if not _is_ours(cls):
        return cls(**changes)
    values: dict[str, object] = {}
    for name, field in config_fields(cls).items():
        is_changed = name in changes
        values[name] = (
            changes.pop(name) if is_changed else field.get_default(call_default_factory=True, validated_data=values)
        )
    if changes:
        raise TypeError(f"{cls.__name__} has no {', '.join(changes)}")
    instance = cls.__new__(cls)
    field_of_key = {key: name for name, key in cls.key_of_field.items()}
    vars(instance).update({field_of_key.get(key, key): value for key, value in values.items()})
    return instance


@dataclass_transform(kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """Turn a class into a frozen, keyword-only, validated dataclass that refuses unknown fields."""
    is_ours = _is_ours(cls)
    dataclass_type: Any = pydantic_dataclass(
        eq=False, kw_only=True, repr=False, config=_OUR_RULES if is_ours else _RULES
    )(cls)
    if (
        not dataclass_type.__pydantic_complete__ and not is_ours
    ):  # it names classes of the function in which it is defined
        rebuild_dataclass(dataclass_type, raise_errors=False, _parent_namespace_depth=3)
    aliases = {name: field.alias for name, field in dataclass_type.__pydantic_fields__.items() if field.alias}
    if aliases:
        dataclass_type.key_of_field = aliases
        for name, key in aliases.items():
            setattr(dataclass_type, key, property(operator.attrgetter(name)))
    if "__eq__" not in vars(dataclass_type):
        dataclass_type.__eq__, dataclass_type.__hash__ = (
            _equal,
            _hashed,
        )  # the decorator's would be compiled for each section
    return dataclass_type


def _extended_by_dataclass(cls: type) -> bool:
    """Return whether the standard library's decorator made a class's own fields, on top of a section's."""
    return "__dataclass_fields__" in vars(cls) and "__pydantic_fields__" not in vars(cls)


def _remake(cls: Any) -> None:
    """Turn a section that a plain ``@dataclass`` has extended into one of :func:`section`, in place.

    The decorator's constructor knows neither the defaults nor the checks of the fields that it extends, and its
    ``__repr__`` shows secrets.
    """
    for name in inspect.get_annotations(cls):
        field = cls.__dataclass_fields__.get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            setattr(cls, name, dataclasses.field(default_factory=field.default_factory))
    for name in ("__repr__", "__eq__", "__hash__"):
        method = vars(cls).get(name, cls)
        if method is None or (method is not cls and inspect.unwrap(method).__code__.co_filename == "<string>"):
            delattr(cls, name)
    section(cls)


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("verl.")


def _compared(section: Any) -> tuple[object, ...]:
    return tuple(getattr(section, field.name) for field in dataclasses.fields(section) if field.compare)


def _equal(section: object, other: object) -> bool:
    return _compared(section) == _compared(other) if type(section) is type(other) else NotImplemented


def _hashed(section: object) -> int:
    return hash(_compared(section))


def local_copies(section: SectionT, without: Collection[str] = ()) -> SectionT:
    """Return the section with remote files and folders replaced by copies on this machine, made now if need be.

    With ``use_shm`` all its files and folders are replaced by copies in shared memory.

    Fields named in ``without`` stay as they are, and so do the files of a data set of the user's own, which reads them.

    Raises:
        DataError: one of them cannot be reached, or is not there.
    """
    changes: dict[str, object] = {}
    own_data, shm = section.get("custom_cls"), section.get("use_shm", False)
    for name, field in config_fields(type(section)).items():
        value = getattr(section, name)
        if name in without or (own_data is not None and own_data.path is not None):
            continue
        if isinstance(value, BaseConfig):
            changes[name] = local_copies(value)
        elif named_section_of(field) is not None:
            copies = {key: local_copies(section) for key, section in value.items()}
            changes[name] = copies if any(copies[key] is not value[key] for key in value) else value
        elif meta_of(field).remote and isinstance(value, str) and (shm or is_remote(value)):
            changes[name] = copy_to_local(value, verbose=True, use_shm=shm)
        elif meta_of(field).remote and isinstance(value, tuple) and (shm or any(map(is_remote, value))):
            urls = [url for path in value for url in (expand(path) if is_remote(path) else [path])]
            changes[name] = tuple(
                copy_to_local(url, verbose=True, use_shm=shm) if shm or is_remote(url) else url for url in urls
            )
    changed = {name: value for name, value in changes.items() if value is not getattr(section, name)}
    return dataclasses.replace(section, **changed) if changed else section  # type: ignore[type-var]


def config_fields(cls: type) -> Mapping[str, FieldInfo]:
    """Map key to pydantic's field info, in the order of the class; a key is the field's name or its alias."""
    if not is_section(cls):  # a plain dataclass of a user's
        return {field.name: FieldInfo() for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if _extended_by_dataclass(cls):
        _remake(cls)
    fields: Mapping[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    keys = getattr(cls, "key_of_field", {})
    return {keys.get(name, name): field for name, field in fields.items()} if keys else fields


def is_section(cls: type) -> bool:
    """Return whether the class, or one that it derives from, was made by :func:`section`."""
    return hasattr(cls, "__pydantic_fields__")


def section_of(field: FieldInfo) -> type[BaseConfig] | None:
    """Return the section class of a field, also where the field is optional."""
    annotation = field.annotation
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseConfig)), None)


def named_section_of(field: FieldInfo) -> type[BaseConfig] | None:
    """Return the section class of a field that holds sections by names of the user's own, a dict of them."""
    arguments = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is dict else ()
    item = arguments[1] if arguments else None
    return item if isinstance(item, type) and issubclass(item, BaseConfig) else None


def meta_of(field: FieldInfo) -> Meta:
    """Return the ``Meta`` of a field, an empty one if it was declared without ``setting``."""
    extra = field.json_schema_extra
    return extra[_META] if isinstance(extra, dict) and _META in extra else _NO_META  # type: ignore[return-value]


def sentence_of(cls: type, name: str) -> str:
    """Return the sentence below a field, also when a parent class declares it; an empty one without source code."""
    sentences = (_sentences(owner.__module__).get((owner.__qualname__, name), "") for owner in cls.__mro__)
    return next(filter(None, sentences), "")


# Read when asked: pydantic's use_attribute_docstrings reads them at each import, which took a third of its time.
@functools.cache
def _sentences(module: str) -> dict[tuple[str, str], str]:
    """Map class (with its outer ones) and field to the sentence below the field, for all classes of a module."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # built in, or typed into an interpreter
        return {}
    sentences: dict[tuple[str, str], str] = {}

    def read(body: list[ast.stmt], prefix: str) -> None:
        for statement, after in itertools.pairwise([*body, ast.Pass()]):
            match statement, after:
                case ast.ClassDef(name=name), _:
                    read(statement.body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name), _:
                    read(statement.body, f"{prefix}{name}.<locals>.")
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                    key = name[:-1] if keyword.iskeyword(name[:-1]) else name
                    sentences[prefix.removesuffix("."), key] = " ".join(sentence.split())

    read(ast.parse(source).body, "")
    return sentences


def _of_type(field: FieldInfo, value: object) -> object:
    below, named = section_of(field), named_section_of(field)
    if named is not None and isinstance(value, Mapping):
        return {name: named.from_mapping(item) if isinstance(item, Mapping) else item for name, item in value.items()}
    return below.from_mapping(value) if below is not None and isinstance(value, Mapping) else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, BaseConfig):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


OneOrMany = BeforeValidator(_one_or_many)
"""Validator for ``Annotated[tuple[str, ...], OneOrMany]``: a single string becomes a list of one."""
