"""Every engine against the contract; a new engine adds one line to ``ENGINES``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.testing.rollout_conformance import CHECKS, EngineUnderTest

ENGINES: dict[str, dict[str, Any]] = {
    "hf": {"families": ("qwen3", "qwen2", "llama", "gemma", "mistral"), "counts_preemptions": True},
    "native": {
        "families": ("qwen3", "qwen2", "llama", "gemma", "gemma2", "mistral"),
        "streams": True,
        "counts_preemptions": True,
    },
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ENGINES)
def test_engine(name: str, check: Callable[[EngineUnderTest], None], tmp_path: Path) -> None:
    check(EngineUnderTest(name, tmp_path, **ENGINES[name]))
