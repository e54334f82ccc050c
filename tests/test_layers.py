"""Imports only go down and never run in a circle; a class name means one thing."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from verl.compat.import_hooks import MOVED

ROOT = Path(__file__).parents[1]

# Longest prefix wins; a module may import its own layer and those below it.
LAYERS = {
    "verl.compat": 9,  # above all: nothing below imports it
    "verl.testing": 9,  # for tests alone: no package of the core imports it
    "verl.api": 8,
    "verl.__main__": 8,
    "verl.cli": 8,
    "verl.plugins": 9,  # beside the core, which loads plug-ins by name
    "verl.trainer": 7,
    "verl.model_merger": 7,
    "verl.experience": 6,
    "verl.agents": 6,
    "verl.serving": 6,
    "verl.workers": 5,
    "verl.single_controller": 4,
    "verl.algorithms": 3,
    "verl.backends": 3,
    "verl.checkpoint": 1,
    "verl.scorers": 1,
    "verl.supervision": 1,
    "verl.datasets": 2,
    "verl.environments": 2,
    "verl.interactions": 2,
    "verl.protocol": 2,
    "verl.schema": 2,
    "verl.tools": 2,
    "verl.tracking": 1,
    "verl.utils": 1,
    "verl.vision": 1,
    "verl.config": 1,
    "verl.errors": 0,
    "verl.base": 0,
    "verl": 8,  # the public face, whose names are loaded when asked for
}


INSTALLED = {"verl.compat", "verl.compat.import_hooks"}
"""The one line by which ``import verl`` installs the import hooks."""


def layer(module: str) -> int:
    prefix = max((p for p in LAYERS if module == p or module.startswith(p + ".")), key=len)
    return LAYERS[prefix]


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "verl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """What a file imports of verl anywhere in it: inside of functions and for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(name for name in names if name == "verl" or name.startswith("verl."))


def test_imports_only_go_down():
    upward = []
    for module, path in modules().items():
        for target in imports_of(path) - (INSTALLED if module == "verl" else set()):
            if layer(target) > layer(module):
                upward.append(f"{module} imports {target}")
    assert not upward, "\n".join(sorted(set(upward)))


def test_no_module_of_ours_takes_an_old_path():
    """What verl/compat holds is for users' code; an old path is no second address of a module that is there."""
    known = modules()
    old = {
        module.replace("verl.compat.old_paths.", "verl.", 1)
        for module in known
        if module.startswith("verl.compat.old_paths.")
    }
    assert not old & set(known)
    old |= {name for path in known.values() for name in imports_of(path) if name.startswith(tuple(MOVED))}
    taken = {f"{module} imports {name}" for module, path in known.items() for name in imports_of(path) & old}
    assert not taken, "\n".join(sorted(taken))


def files_imported_by(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules behind the imports of a file: of ``from a.b import c`` the file a/b/c.py, else a/b."""
    names = {name for name in imports_of(path) if name in known}
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return names - packages


def test_no_imports_run_in_a_circle():
    known = modules()
    graph = {module: files_imported_by(path, known) - {module} for module, path in known.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" > ".join(error.args[1]))


def test_rooms_do_not_import_each_other_in_a_circle():
    rooms: dict[str, set[str]] = {}
    known = modules()
    for module, path in known.items():
        room = ".".join(module.split(".")[:2])
        rooms.setdefault(room, set()).update(".".join(other.split(".")[:2]) for other in files_imported_by(path, known))
    rooms.pop("verl")
    try:
        graphlib.TopologicalSorter({room: others - {room, "verl"} for room, others in rooms.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" > ".join(error.args[1]))


def test_a_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


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
    # A DataProtoFuture resolves Ray references lazily, and agent loops and routers run in actors; nothing else may know
    # Ray.
    known = {"verl.protocol", "verl.agents.ray", "verl.agents.ray_trajectories", "verl.serving.ray"}
    assert set(guilty) <= known, sorted(set(guilty))


def test_light_modules_start_neither_ray_nor_transformers():
    modules = "verl.errors, verl.protocol, verl.algorithms, verl.trainer.ppo.core_algos"
    code = f"import sys, {modules}; print([m for m in ('ray', 'transformers', 'hydra') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_no_library_module_prints_or_excepts_blindly():
    guilty = []
    for module, path in modules().items():
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                guilty.append(f"{module}:{node.lineno} print")
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "BaseException"):
                guilty.append(f"{module}:{node.lineno} blind except")
            is_broad = isinstance(node, ast.ExceptHandler) and node.type and ast.unparse(node.type) == "Exception"
            if is_broad and "#" not in lines[node.lineno - 1]:
                guilty.append(f"{module}:{node.lineno} except Exception without the reason")
    assert not guilty, guilty
