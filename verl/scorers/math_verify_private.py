"""Private parts of the library math-verify: the functions of its grader, in a copy of the module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

REPLACEABLE = (
    "sympy_numeric_eq",
    "sympy_symbolic_eq",
    "sympy_solve_and_compare",
    "sympy_compare_sets",
    "safe_sympy_doit",
    "verify",
)
"""Functions of the grader that :mod:`.math_values` replaces or calls."""


def load_grader() -> ModuleType:
    """Load the grader of math-verify as a module of our own, in which functions may be replaced.

    ``math_verify.grader`` itself stays as it is for others in the process.

    Raises:
        ImportError: the installed version has no function of one of the names in ``REPLACEABLE``.
    """
    spec = importlib.util.find_spec("math_verify.grader")
    if spec is None or spec.loader is None:
        raise ImportError("math-verify has no module grader; install a version that pyproject.toml names.")
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    if missing := [name for name in REPLACEABLE if not hasattr(grader, name)]:
        raise ImportError(
            f"math_verify.grader has no {', '.join(missing)}; install a version that pyproject.toml names."
        )
    return grader
