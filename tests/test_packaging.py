"""What a wheel must hold beside modules that are imported: files that are run by their path, compiled or read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="builds with the setuptools that is installed")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "verl", source / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "verl").rglob("*") if path.suffix in SUFFIXES}
    assert {f"verl/workers/rollout/{path}" for path in RUN_BY_PATH} | {"verl/utils/cpu_kernels/decoding.c"} <= present
    assert present <= packed, f"not in the wheel: {sorted(present - packed)}"


SUFFIXES = (".py", ".c", ".h", ".yaml", ".typed")
RUN_BY_PATH = (
    "checksum.py",
    "sampling.py",
    "server_guard.py",
    "sglang/engine_side/verl_sglang.py",
    "sglang/engine_side/verl_sglang_arguments.py",
    "sglang/engine_side/verl_sglang_server.py",
    "vllm/engine_side/verl_vllm_extension.py",
)
