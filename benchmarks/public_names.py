"""Which names of public modules of verl resolve here, and why the others do not; for several versions of verl.

python -m benchmarks.public_names tests/public_names.txt --version v0.8.0 --missing

A line of the list is the versions, a module, a name (``(module)``: the module itself; ``Class.method``), what it is
and its calling form, separated by tabs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path

from benchmarks.public_imports import Count, resolves
from verl.compat.import_hooks import CLASSES

VERSIONS = ("dev", "v0.8.0", "v0.9.0", "v0.9.1", "head")


def public_names(lines: Iterable[str], version: str | None = None) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Map module and name to kind and calling form, one for each form that the versions have.

    Args:
        lines: lines of the list.
        version: one of ``VERSIONS``; by default all.
    """
    names: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        versions, module, name, kind, *form = line.rstrip("\n").split("\t")
        if version is None or version in versions.split(","):
            names.setdefault((module, name), []).append((kind, form[0] if form else ""))
    return names


def count_names(names: Iterable[tuple[str, str]]) -> Count:
    """Look up every name; each counts as one use."""
    counted = Count()
    for module, name in names:
        counted.add(address_of(module, name), 1, name_resolves(module, name))
    return counted


def address_of(module: str, name: str) -> str:
    """The address by which the table of absences knows a name: an attribute stands under the home of its class."""
    owner, _, attribute = name.partition(".")
    if name == "(module)":
        return module
    if attribute and resolves(module, owner):
        cls = getattr(importlib.import_module(module), owner)
        return f"{CLASSES.get(cls.__module__, {}).get(cls.__name__, f'{module}.{owner}')}.{attribute}"
    return f"{module}.{name}"


def name_resolves(module: str, name: str) -> bool:
    """Whether a name can be imported, or a class has this attribute in its instances."""
    owner, _, attribute = name.partition(".")
    if not resolves(module, owner):
        return False
    if not attribute:
        return True
    cls = getattr(importlib.import_module(module), owner)
    return hasattr(cls, attribute) or attribute in inspect.get_annotations(cls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--version", choices=VERSIONS, help="look at the names of one version (default: of each)")
    parser.add_argument("--missing", action="store_true", help="list the names that do not resolve, by reason")
    arguments = parser.parse_args()
    for version in [arguments.version] if arguments.version else VERSIONS:
        counted = count_names(public_names(arguments.list.read_text().splitlines(), version))
        print(f"{version}: {counted.resolved_names} of {counted.names} names resolve ({counted.share:.1%})")
        if arguments.missing:
            print("\n".join(counted.reasons()), end="\n\n")
