"""Registry of objects that are chosen by name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from verl.errors import ConfigError

T = TypeVar("T")


def suggest(name: str, candidates: Sequence[str]) -> str:
    """``" Did you mean 'grpo'?"`` for the known name nearest to ``name``, or an empty string."""
    near = [candidate for candidate in candidates if candidate.casefold() == name.casefold()]
    near = near or difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


class Registry(Generic[T]):
    """Objects by name; refuses duplicates and suggests the nearest name on a miss.

    Args:
        kind: what is registered, for error messages: ``"advantage estimator"``.
        origin: the function or class behind an object, where it is not the object itself.
    """

    def __init__(self, kind: str, origin: Callable[[T], object] = lambda entry: entry) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}  # one dict for ever: code outside may hold it
        self._origin = origin
        _registries.add(self)

    def add(self, name: str, entry: T) -> None:
        """Register ``entry`` under ``name``; the same function or class, defined again, takes the place of the first.

        Raises:
            ConfigError: another object already has this name.
        """
        existing = self._entries.get(name, entry)
        first, second = (_path(self._origin(registered)) for registered in (existing, entry))
        # A module may be imported under two names, and a cell of a notebook run again: that is no duplicate.
        if first == second:
            self._entries[name] = entry
        else:
            raise ConfigError(
                f"{self.kind} '{name}' is registered twice: {first} and {second}. Give one of them another name."
            )

    def remove(self, name: str) -> None:
        """Remove the object called ``name``.

        Raises:
            KeyError: there is none.
        """
        del self._entries[name]

    def register(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under ``name``."""

        def decorator(entry: T) -> T:
            self.add(name, entry)
            return entry

        return decorator

    def get(self, name: str) -> T:
        """Return the object called ``name``.

        Raises:
            ConfigError: nothing has this name; the message lists the known ones.
        """
        if name not in self._entries:
            raise ConfigError(
                f"unknown {self.kind} '{name}'.{suggest(name, self.names())} Known: {', '.join(self.names())}."
            )
        return self._entries[name]

    def _restore(self, before: dict[str, T], modules: set[str]) -> None:
        """Return to earlier entries; modules that came later and registered something are imported again when asked."""
        for name in self._entries.keys() - before.keys():
            origin = self._origin(self._entries[name])
            # An address names its module itself; code that was executed from text has none.
            module = origin if isinstance(origin, str) else getattr(origin, "__module__", None) or ""
            if module.partition(".")[0] == "verl":  # verl registers its own while it is imported, once for a process
                before[name] = self._entries[name]
            elif module not in modules:
                sys.modules.pop(module, None)
        self._entries.clear()
        self._entries.update(before)

    @property
    def entries(self) -> dict[str, T]:
        """The objects by name: the dict itself, which code outside may read and change."""
        return self._entries

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


class RegistryView(MutableMapping[str, Any]):
    """The functions of a registry by name, as a dict that code outside reads, and adds to.

    Args:
        registry: what is shown.
        function_of: the function of a name.
        register: returns the decorator that registers a function under a name.
    """

    def __init__(
        self,
        registry: Registry,
        function_of: Callable[[str], object],
        register: Callable[[str], Callable[[Any], object]],
    ) -> None:
        self._registry = registry
        self._function_of = function_of
        self._register = register
        self._shown: dict[object, object] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._registry:
            raise KeyError(name)
        function = self._function_of(name)
        self._shown[function] = self._registry.get(name)
        return function

    def __setitem__(self, name: str, function: object) -> None:
        if function in self._shown:  # it was read here, and comes back with what was known of it
            self._registry.entries[name] = self._shown[function]
        else:
            self._register(name)(function)

    def copy(self) -> dict[str, Any]:
        """Return the functions of all names in a dict."""
        return dict(self)

    def __delitem__(self, name: str) -> None:
        self._registry.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry.names())


_registries: WeakSet[Registry] = WeakSet()


@contextmanager
def scoped_registrations() -> Iterator[None]:
    """Undo what code outside verl registers inside the context, in all registries; for tests."""
    modules, before = set(sys.modules), {registry: dict(registry._entries) for registry in _registries}
    try:
        yield
    finally:
        for registry in _registries:
            registry._restore(before.get(registry, {}), modules)


def _path(entry: object) -> str:
    if isinstance(entry, str):  # an address
        return entry
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"
