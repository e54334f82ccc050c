"""Nested settings by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted path and value of every leaf; an empty mapping is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
