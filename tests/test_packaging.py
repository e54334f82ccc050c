"""What a wheel must hold beside modules that are imported: files that are run by their path, compiled or read."""

from __future__ import annotations

import os
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
    for package in ("verl", "verl-stubs"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = [*(ROOT / "verl").rglob("*"), *(ROOT / "verl-stubs").rglob("*")]
    present = {str(path.relative_to(ROOT)) for path in files if path.suffix in SUFFIXES}
    assert {f"verl/{path}" for path in RUN_BY_PATH} <= present
    assert present <= packed, f"not in the wheel: {sorted(present - packed)}"
    shutil.rmtree(source)  # only the wheel is left
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    program = tmp_path / "installed/verl/cli/bundled/examples/quickstart/quickstart.py"
    task = [sys.executable, str(program.with_name("make_task.py")), "--output_dir", str(tmp_path / "task")]
    sizes = ["--sft_size=8", "--train_size=8", "--test_size=8"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for command in ([sys.executable, str(program), "--help"], [*task, *sizes]):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=environment)
    assert (tmp_path / "task/rl_train.parquet").is_file()


SUFFIXES = (".py", ".pyi", ".c", ".h", ".yaml", ".typed", ".html", ".js", ".css", ".svg", ".LICENSE")
RUN_BY_PATH = (
    "backends/cpu/kernels/decoding.c",
    "supervision/prctl.py",
    "supervision/server_guard.py",
    "workers/rollout/sampling.py",
    "workers/rollout/engine_side/verl_engine.py",
    "workers/rollout/engine_side/verl_sglang.py",
    "workers/rollout/engine_side/verl_sglang_server.py",
    "workers/rollout/engine_side/verl_vllm.py",
)
