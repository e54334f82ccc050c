"""Names that say nothing of what they hold become fewer."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "verl"
VAGUE = frozenset(
    {
        "asked",
        "begun",
        "chosen",
        "drawn",
        "every",
        "found",
        "given",
        "kept",
        "known",
        "made",
        "number",
        "once",
        "one",
        "others",
        "ours",
        "own",
        "placed",
        "said",
        "taken",
        "theirs",
        "told",
        "wanted",
        "whole",
        "wrong",
    }
)
# Measured, and never to be raised. A name is a noun of the field: prompts, adapters, step_index.
MAX_VAGUE_NAMES = 34
MAX_OF_NAMES = 1
"""Variables, parameters and attributes called ``of_*``."""


def stored_names(tree: ast.AST) -> Counter[str]:
    """Count variables, parameters and attributes that a module stores, by name."""
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names[node.attr] += 1
    return names


def test_vague_names_become_fewer() -> None:
    names: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        names += stored_names(ast.parse(path.read_text()))
    vague = {name: count for name, count in names.items() if name.lstrip("_").lower() in VAGUE}
    of_names = {name: count for name, count in names.items() if name.lstrip("_").lower().startswith("of_")}
    assert sum(vague.values()) <= MAX_VAGUE_NAMES, vague
    assert sum(of_names.values()) <= MAX_OF_NAMES, of_names
