"""Requirements of this installation of verl, and the command that installs the packages of an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def requirements(extra: str = "") -> list[Requirement]:
    """Return what verl requires on this machine, or what an extra of it adds, without markers.

    In a clone pyproject.toml says it, because the metadata of an editable installation may be older; elsewhere the
    metadata of the installed package.
    """
    import importlib.metadata  # here, because every command imports this module, and few need it
    import tomllib

    from packaging.requirements import Requirement

    if (project := Path(__file__).parents[2] / "pyproject.toml").is_file():
        stated = tomllib.loads(project.read_text())["project"]
        texts = stated["optional-dependencies"].get(extra, []) if extra else stated["dependencies"]
        parsed = [Requirement(text) for text in texts]
    else:
        stated = [Requirement(text) for text in importlib.metadata.requires("verl") or []]
        parsed = [requirement for requirement in stated if ("extra" in str(requirement.marker)) == bool(extra)]
    parsed = [
        requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]
    for requirement in parsed:
        requirement.marker = None
    return parsed


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, in a clone and from a wheel alike.

    It names the packages themselves, because on the package index ``verl`` is another project's name.
    """
    packages = requirements(extra)
    assert packages, f"verl has no extra '{extra}'"
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])
