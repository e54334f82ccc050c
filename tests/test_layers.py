"""Imports only go down: trainer > workers > single_controller > algorithms > protocol > utils."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Longest prefix wins; a module may import its own layer and those below it.
LAYERS = {
    "verl.trainer": 6,
    "verl.model_merger": 6,
    "verl.workers": 5,
    "verl.experimental": 5,
    "verl.single_controller": 4,
    "verl.trainer.ppo.core_algos": 3,
    "verl.protocol": 2,
    "verl.schema": 2,
    "verl.utils": 1,
    "verl.base_config": 1,
    "verl.errors": 0,
    "verl.utils.registry": 0,
    "verl": 2,
}


def layer(module: str) -> int:
    prefix = max((p for p in LAYERS if module == p or module.startswith(p + ".")), key=len)
    return LAYERS[prefix]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "verl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for child in block.body
        for node in ast.walk(child)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in names if name == "verl" or name.startswith("verl.")}


def test_imports_only_go_down():
    upward = []
    for module, path in modules().items():
        for target in imports_of(path):
            if layer(target) > layer(module):
                upward.append(f"{module} imports {target}")
    assert not upward, "\n".join(sorted(set(upward)))


def test_ray_is_imported_only_by_the_ray_controller():
    guilty = []
    for module, path in modules().items():
        if module.startswith("verl.single_controller.ray"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name == "ray" or name.startswith("ray.") for name in names):
                guilty.append(module)
    # A DataProtoFuture resolves Ray references lazily; nothing else may know Ray.
    assert set(guilty) <= {"verl.protocol"}, sorted(set(guilty))


@pytest.mark.parametrize("module", ["verl.protocol", "verl.trainer.ppo.core_algos", "verl.errors"])
def test_light_modules_start_neither_ray_nor_transformers(module: str):
    code = f"import sys, {module}; print([m for m in ('ray', 'transformers', 'hydra') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_no_library_module_prints_or_excepts_blindly():
    guilty = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                guilty.append(f"{module}:{node.lineno} print")
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "BaseException"):
                guilty.append(f"{module}:{node.lineno} blind except")
    assert not guilty, guilty
