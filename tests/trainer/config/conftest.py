from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.config.support import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)
