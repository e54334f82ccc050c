"""What a release of verl on PyPI changes against an earlier one, and what of it would break here.

It reads facts of the wheels: configuration keys with their defaults, names of modules with their calling forms.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.public_names import address_of, name_resolves
from verl.base.nested import flat
from verl.compat.absent_names import absence_of
from verl.config import BaseConfig, EvalConfig, PPOConfig, Problem, SFTConfig
from verl.trainer.config.keys import get, put
from verl.trainer.config.translate import Translator

ROOTS: Mapping[str, type[BaseConfig]] = {"sft": SFTConfig, "evaluation": EvalConfig}
"""First part of a configuration's name to its sections; all others are those of reinforcement learning."""

_MISSING = object()
Keys = dict[str, Any]
Names = dict[tuple[str, str], str]
"""Module and name (``(module)``: the module itself; ``Class.method``) to the calling form."""


def fetch(release: str, folder: Path) -> Path:
    """Return a folder with the files of a release: a version on PyPI, or the path of a wheel."""
    wheel = Path(release)
    if wheel.suffix != ".whl":
        download = folder / f"wheel-{release}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(download), f"verl=={release}"], check=True)
        (wheel,) = download.glob("*.whl")
    root = folder / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root


def configurations(root: Path) -> dict[str, Keys]:
    """Compose the configurations of a release; return keys and defaults, not interpolated, by name."""
    shared = root / "verl" / "trainer" / "config"
    files = [*sorted(shared.glob("*.yaml"), reverse=True), *sorted(root.glob("verl/experimental/*/config/*.yaml"))]
    commands = [file for file in files if not file.name.startswith("_") and "defaults:" in file.read_text()]
    return {file.stem: _keys(file, shared) for file in commands}


def _keys(file: Path, shared: Path) -> Keys:
    import hydra

    with hydra.initialize_config_dir(version_base=None, config_dir=str(file.parent.resolve())):
        composed = hydra.compose(file.stem, overrides=[f"hydra.searchpath=[file://{shared.resolve()}]"])
    tree: Any = OmegaConf.to_container(composed, resolve=False)
    return dict(flat(tree))


def names(root: Path) -> Names:
    """Return the public names of all modules of a release."""
    found: Names = {}
    for file in sorted(root.glob("verl/**/*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[module, "(module)"] = ""
        found |= {(module, name): form for name, form in _names_of(ast.parse(file.read_text()))}
    return found


def _names_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, _form(node)
            case ast.ClassDef():
                yield node.name, ""
                methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
                yield from ((f"{node.name}.{method.name}", _form(method)) for method in methods)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, ""
            case ast.ImportFrom(module=source, level=level) if level or str(source).startswith("verl"):
                yield from ((alias.asname or alias.name, "") for alias in node.names)


def _form(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Write the parameters of a function without types, and without ``self``."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = ast.unparse(function.args)
    return f"({text.removeprefix('self').removeprefix('cls').removeprefix(', ')})"


def refusal(configuration: str, key: str, default: object) -> str | None:
    """Return why the command of a configuration refuses a key that is set to its default; None if it accepts it."""
    tree: dict[str, Any] = {}
    put(tree, key, default)
    problems: list[Problem] = []
    root = next((section for start, section in ROOTS.items() if configuration.startswith(start)), PPOConfig)
    Translator.for_root(root, (key,), problems).translate(tree)
    return problems[0].cause if problems else None


def changed_keys(new: Mapping[str, Keys], old: Mapping[str, Keys]) -> Iterator[tuple[str, str, object, str]]:
    """Yield configuration, key, default and a note for each new key and each new default, once for all commands."""
    seen = set()
    for configuration, keys in new.items():
        before = old.get(configuration, {})
        for key, default in keys.items():
            is_new = key not in before
            if not (is_new or before[key] != default) or key.endswith("_target_") or (key, str(default)) in seen:
                continue
            seen.add((key, str(default)))
            yield configuration, key, default, "" if is_new else f" (was {before[key]})"


def missing_keys(release: Mapping[str, Keys], configuration: str = "ppo_trainer") -> list[str]:
    """Return keys of a release that a program with a ``hydra.main`` of its own cannot override here."""
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        here: Any = OmegaConf.to_container(hydra.compose(configuration), resolve=False)
    keys = (key for key in release[configuration] if not key.endswith("_target_"))
    return [key for key in keys if get(here, key, _MISSING) is _MISSING]


def changed_names(new: Names, old: Names, modules: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and a note for names and calling forms that are new, in public modules and in new ones."""
    known = {module for module, _ in old}
    for (module, name), form in sorted(new.items()):
        is_private = any(part.startswith("_") for part in (*module.split("."), *name.split(".")))
        if is_private or (module in known and module not in modules) or old.get((module, name)) == form:
            continue
        yield module, name, f"{form} (was {old[module, name]})" if (module, name) in old else form


def report(release: str, since: str, modules: set[str], folder: Path) -> int:
    """Print what a release changes since another; return how many new settings and names fail here without a reason.

    Args:
        release: a version on PyPI, or a wheel.
        since: an earlier one.
        modules: those whose names count; all names of a new module do.
        folder: for the files.
    """
    new, old = (fetch(each, folder) for each in (release, since))
    failures = 0
    print(f"Keys of {release} that {since} lacks, or has with another default:")
    for configuration, key, default, note in changed_keys(configurations(new), configurations(old)):
        reason = refusal(configuration, key, default)
        failures += reason is not None
        print(f"  {configuration} {key}: {json.dumps(default)}{note}" + (f"  REFUSED: {reason}" if reason else ""))
    missing = missing_keys(configurations(new))
    print(f"Keys of {release} that a program under its own hydra.main cannot override ({len(missing)}):")
    sections = Counter(key.rpartition(".")[0] for key in missing)
    for section, count in sections.items():
        print(f"  ppo_trainer {section}: {count}")
    print(f"Names of {release} that {since} lacks, or has with another form:")
    for module, name, note in changed_names(names(new), names(old), modules):
        address = address_of(module, name)
        state = "" if name_resolves(module, name) else f"  {getattr(absence_of(address), 'kind', 'MISSING')}"
        failures += state == "  MISSING"
        print(f"  {address}{note}{state}")
    print(f"{failures} settings and names of {release} fail here without a reason")
    return failures
