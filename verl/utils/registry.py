"""One registry for everything that is chosen by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from verl.errors import ConfigError

T = TypeVar("T")


def suggest(name: str, known: list[str]) -> str:
    """``" Did you mean 'grpo'?"`` for the known name nearest to ``name``, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


class Registry(Generic[T]):
    """Names and what they stand for; refuses doubles and names the nearest on a miss.

    Args:
        kind: what is registered, for error messages: ``"advantage estimator"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files its object under ``name``.

        Registering the same object twice is harmless (a module may be imported under two names).

        Raises:
            ConfigError: another object already has this name.
        """

        def file(entry: T) -> T:
            known = self._entries.setdefault(name, entry)
            if known is not entry and _origin(known) != _origin(entry):
                raise ConfigError(
                    f"{self.kind} '{name}' is registered twice: {_origin(known)} and {_origin(entry)}. "
                    "Give one of them another name."
                )
            return entry

        return file

    def get(self, name: str) -> T:
        """The object called ``name``.

        Raises:
            ConfigError: nothing has this name; the message lists those that exist.
        """
        if name not in self._entries:
            raise ConfigError(
                f"unknown {self.kind} '{name}'.{suggest(name, self.names())} Known: {', '.join(self.names())}."
            )
        return self._entries[name]

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _origin(entry: object) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"
