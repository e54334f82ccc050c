"""Find the places of the package that choose by the device, NCCL or flash-attention."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

WORDS = ("cuda", "nccl", "flash_attn", "flash_attention_2", "cpu:gloo,cuda:nccl")
LIBRARIES = ("flash_attn", "pynvml")
ELSEWHERE = ("compat", "testing")
"""Packages that runs do not use."""


def is_branch(node: ast.AST) -> bool:
    """Whether a node names the device, its library of collectives or its kernels, or asks whether it is no CPU."""
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cpu" for side in (node.left, *node.comparators))
    if isinstance(node, ast.Constant):
        return node.value in WORDS
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    return module.split(".")[0] in LIBRARIES or module.endswith(".varlen")


def _names(node: ast.AST, outer: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        name = f"{outer}.{child.name}".lstrip(".") if is_scope else outer
        if is_branch(child):
            yield name
        yield from _names(child, name)


@cache
def branches(package: Path) -> set[str]:
    """Return ``file:function`` of all places, with files below the package."""
    found = set()
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if path.parts[0] not in ELSEWHERE:
            found |= {f"{path}:{name}" for name in _names(ast.parse(file.read_text()), "")}
    return found
