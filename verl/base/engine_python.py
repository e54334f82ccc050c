"""Locate the installation of a rollout engine of another project."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENTS = Path("/opt")
"""Folder in which the image and the pages put the environment of an engine, under its name."""


def engine_python(engine: str) -> str | None:
    """Return the interpreter that has an engine: this one, or that of ``/opt/<engine>``; None if neither has it."""
    if find_spec(engine) is not None:
        return sys.executable
    python = ENVIRONMENTS / engine / "bin" / "python"
    return str(python) if python.is_file() else None
