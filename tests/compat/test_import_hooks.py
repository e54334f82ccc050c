"""Old import paths in processes of their own: from a folder, from a zip file, as a command, after an upgrade."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
import inspect, os, pickle, sys
import verl
LIGHT = {"verl.errors", "verl.base", "verl.base.plugins", "verl.base.lazy", "verl.compat", "verl.compat.import_hooks"}
assert not [name for name in sys.modules if name.startswith("verl.") and name not in LIGHT]
from verl.experimental import dataset
import verl.base_config
import verl.utils.dataset.files
from verl.config.base import BaseConfig
assert dataset.__doc__
assert verl.base_config.__file__.endswith(os.path.join("verl", "compat", "old_paths", "base_config.py"))
assert "BaseConfig as BaseConfig" in inspect.getsource(verl.base_config)
assert sys.modules["verl.datasets.files"] is verl.utils.dataset.files
assert pickle.loads(b"cverl.base_config\\nBaseConfig\\n.") is BaseConfig
for statement in ("import verl.no_such_module", "from verl.utils import no_such_module", "import verl.errors.x"):
    try:
        exec(statement)
    except ImportError as error:
        assert "is not in this version" not in str(error)
    else:
        raise AssertionError(statement)
print(verl.__path__[0])
"""


def run(*arguments: str, path: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_old_paths_work_wherever_the_package_lies(tmp_path: Path, packed: bool):
    copy = tmp_path / "site" / "verl"
    shutil.copytree(ROOT / "verl", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for left_behind in (
        "experimental",
        "base_config",
        "utils/dataset",
    ):  # as `git pull` leaves a folder whose modules have moved
        (copy / left_behind / "__pycache__").mkdir(parents=True)
    site = copy.parent
    if packed:
        site = Path(shutil.make_archive(str(tmp_path / "site"), "zip", copy.parent))
    assert Path(run("-c", USE, path=site).strip()) == site / "verl"


def test_an_old_path_runs_as_a_command():
    assert run("-m", "verl.base_config", path=ROOT) == ""
