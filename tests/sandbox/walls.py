"""Tests that run programs need bubblewrap and namespaces; where they are missing, the reason is shown."""

import functools

import pytest

from verl.utils.sandbox import SandboxUnavailableError
from verl.utils.sandbox.runner import proven_walls


@functools.cache
def _missing() -> str:
    try:
        proven_walls()
    except SandboxUnavailableError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_missing()), reason=f"no sandbox here: {_missing()}")
