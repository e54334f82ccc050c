"""Write verl-stubs, by which type checkers and editors find old import paths: verl/compat/old_paths, moved packages.

python -m docs.generate.stubs

An installation does so too (setup.py). Takes seconds; whatever else lies in verl-stubs is removed.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD_PATHS = ROOT / "verl" / "compat" / "old_paths"
MOVED: dict[str, str] = runpy.run_path(str(ROOT / "verl" / "compat" / "import_hooks.py"))["MOVED"]


def stubs() -> dict[str, str]:
    """Text of each file of verl-stubs by its path there: the re-exports of one old path.

    Each module is written as a package, ``roles/__init__.pyi``: for a type checker that merges the stubs with the
    installed package the folder is there then, and it does not report a module without source.
    """
    files = {"py.typed": "partial\n"}
    for file in sorted(OLD_PATHS.rglob("*.py")):
        module = file.relative_to(OLD_PATHS).with_suffix("")
        folder = module.parent if module.name == "__init__" else module
        tree = ast.parse(file.read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        lines = [ast.unparse(node) for node in imports]
        names = [(alias.name, alias.asname) for node in imports for alias in node.names]
        if any(here not in (name, None) for name, here in names):
            # In a stub, `A as B` alone keeps B private.
            lines.append(f"__all__ = {[here for _, here in names if here is not None]}")
        files[str(folder / "__init__.pyi")] = "".join(f"{line}\n" for line in lines)
    for public, home in MOVED.items():
        package = ROOT.joinpath(*home.split("."))
        for file in sorted(package.rglob("*.py")) or [package.with_suffix(".py")]:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            folders = (public + module.removeprefix(home)).split(".")[1:]
            files[str(Path(*folders, "__init__.pyi"))] = f"from {module} import *\n"
    return files


def write(folder: Path) -> None:
    """Replace a folder by the stubs."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in stubs().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write(ROOT / "verl-stubs")
