"""What pyproject.toml cannot say: a build has files that git has not.

A wheel has the quickstart, so that ``verl quickstart`` needs no clone; an editable install runs that of the clone. Both
have ``verl-stubs``, by which type checkers and editors find old import paths.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

QUICKSTART = (
    "examples/__init__.py",
    *(f"examples/quickstart/{name}.py" for name in ("quickstart", "make_task", "settings", "curves")),
    *(f"examples/data_preprocess/{name}.py" for name in ("_common", "countdown")),
)


class BuildWithMadeFiles(build_py):
    """Copies the quickstart to ``verl/cli/bundled`` and writes ``verl-stubs``, for an editable install in the clone."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib)
        runpy.run_path("docs/generate/stubs.py")["write"](root / "verl-stubs")
        for name in () if self.editable_mode else QUICKSTART:
            target = root / "verl/cli/bundled" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)


setup(cmdclass={"build_py": BuildWithMadeFiles})
