from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.config.support import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults do not follow a Ray that other tests have started on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
