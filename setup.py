"""What pyproject.toml cannot say: a wheel has the quickstart, so that `verl quickstart` needs no clone."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

QUICKSTART = (
    "examples/__init__.py",
    *(f"examples/quickstart/{name}.py" for name in ("quickstart", "make_task", "settings", "curves")),
    *(f"examples/data_preprocess/{name}.py" for name in ("_common", "countdown")),
)


class BuildWithQuickstart(build_py):
    """Copies the quickstart to ``verl/cli/bundled``; an editable install runs that of the clone."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        for name in () if self.editable_mode else QUICKSTART:
            target = Path(self.build_lib) / "verl/cli/bundled" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)


setup(cmdclass={"build_py": BuildWithQuickstart})
