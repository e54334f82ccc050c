"""The wheel and the sdist, built as for a release, and the commands of an environment that has nothing else of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
import zlib
from pathlib import Path

import pytest

import verl
from docs.generate.stubs import stubs

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("verl", "examples")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "docs/generate/stubs.py")
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
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


def build(kind: str, source: Path, into: Path) -> Path:
    into.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", into], cwd=source, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


def contents(wheel: Path) -> dict[str, int]:
    """Checksum of each file of a wheel; RECORD repeats them."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if not one.filename.endswith("/RECORD")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of a clone, and one of its sdist; both sources are gone."""
    pytest.importorskip("setuptools", minversion="77", reason="builds with the setuptools that is installed")
    folder = tmp_path_factory.mktemp("build")
    clone = folder / "clone"
    for name in SOURCES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "docs/generate").mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, clone / name)
    sdist = build("sdist", clone, folder / "sdist")
    built = {"clone": build("wheel", clone, folder / "of_clone")}
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    built["sdist"] = build("wheel", unpacked, folder / "of_sdist")
    for source in (clone, unpacked):
        shutil.rmtree(source)
    return built


def test_a_wheel_has_every_file_of_the_package(wheels: dict[str, Path]) -> None:
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "verl").rglob("*") if path.suffix in SUFFIXES}
    assert {f"verl/{path}" for path in RUN_BY_PATH} <= present
    packed = contents(wheels["clone"])
    assert present <= packed.keys(), f"not in the wheel: {sorted(present - packed.keys())}"
    assert "verl/cli/bundled/examples/quickstart/quickstart.py" in packed
    made = {f"verl-stubs/{name}": zlib.crc32(text.encode()) for name, text in stubs().items()}
    assert {name: checksum for name, checksum in packed.items() if name.startswith("verl-stubs/")} == made


def test_an_sdist_makes_the_same_wheel(wheels: dict[str, Path]) -> None:
    assert contents(wheels["sdist"]) == contents(wheels["clone"])


class Installed:
    """An environment with the wheel, and a folder to type commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.bin = folder / "venv/bin"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)

    def run(self, *command: str | Path) -> str:
        """Run a program of the environment to its end; returns what it printed."""
        ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
        variables = {key: value for key, value in os.environ.items() if key not in ours and "VERL_" not in key}
        variables["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        words = [self.bin / command[0], *command[1:]]
        done = subprocess.run(words, cwd=self.folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def pip(self, *words: str | Path) -> None:
        options = ("--disable-pip-version-check", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", *options, *words)


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of the sdist, installed as docs/install.md says."""
    environment = Installed(tmp_path_factory.mktemp("installed"))
    environment.pip("torch")
    environment.pip(wheels["sdist"])
    environment.run("python", "-m", "pip", "check")
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_answers(installed: Installed) -> None:
    where = installed.run("python", "-c", "import verl; print(verl.__file__)").strip()
    assert Path(where).is_relative_to(installed.bin.parent)
    assert installed.run("verl", "--version").strip() == f"verl, version {verl.__version__}"
    page = installed.run("verl", "explain", "trainer.rollout_token_dump_freq")
    assert "verl/trainer/ppo/trainer.py" in page
    assert "rollout:" in installed.run("verl", "train", "--cfg", "job")
    findings = {one["name"]: one["verdict"] for one in json.loads(installed.run("verl", "doctor", "--json"))}
    assert findings["ray"] == findings["torch"] == findings["transformers"] == "ok"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_has_the_quickstart_with_its_report(installed: Installed) -> None:
    told = installed.run("verl", "quickstart", "--warm_up_steps", "3", "--steps", "1", "--output_dir", "small")
    assert "Held-out accuracy on 500 prompts" in told
    report = (installed.folder / "small/report.html").read_text()
    assert "critic/score/mean" in report
