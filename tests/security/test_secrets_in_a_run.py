"""A whole run whose configuration and environment hold secrets: none is in anything that it says or leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides

MARK = "Marked-s3cret"
"""Part of every secret below."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    assert kwargs["api_key"] == "MARK-key-01", kwargs  # the run itself has it
    assert kwargs["headers"]["Authorization"].endswith("MARK-bearer-02"), kwargs
    assert kwargs["note"] == "MARK-environment-03", kwargs
    if kwargs.get("fail"):
        raise ValueError("the service says: MARK-environment-03 is wrong")
    return float(len(solution_str))
""".replace("MARK", MARK)


def start(folder: Path, *more: str, ray_folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own; returns what it said."""
    (folder / "reward.py").write_text(REWARD)
    kwargs = "custom_reward_function.reward_kwargs"
    settings = [
        *overrides(make_tiny_run(folder), folder, trainer__save_freq=1, trainer__logger="[console,file,tensorboard]"),
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"{kwargs}.api_key={MARK}-key-01",
        f"{kwargs}.headers={{Authorization: 'Bearer {MARK}-bearer-02'}}",
        f"{kwargs}.note=${{oc.env:SOME_SERVICE_API_KEY}}",
        f"{kwargs}.proxy=http://me:{MARK}-login-04@proxy:3128",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={MARK}-variable-05",
        f"trainer.rollout_data_dir={folder / 'responses'}",
        f"trainer.validation_data_dir={folder / 'responses-of-validation'}",
        *more,
    ]
    variables = os.environ | {
        "SOME_SERVICE_API_KEY": f"{MARK}-environment-03",
        "VERL_LOGGING_LEVEL": "DEBUG",
        "VERL_FILE_LOGGER_ROOT": str(folder),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_TMPDIR": str(ray_folder or folder),
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=110)


def leaks(folder: Path) -> list[str]:
    """Files that hold the mark, but for the one that the test wrote, and what Python has compiled of it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name.partition(".")[0] != "reward"]
    return [str(path.relative_to(folder)) for path in files if MARK.encode() in path.read_bytes()]


def test_a_run_leaves_no_secret_behind(tmp_path: Path):
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert MARK not in done.stdout + done.stderr
    written = {path.name for path in tmp_path.rglob("*")}
    assert {"config.yaml", "overrides.yaml", "hydra.yaml", "main_ppo.log", "global_step_2", "1.jsonl"} <= written
    assert any(name.startswith("events.out.tfevents") for name in written)
    assert leaks(tmp_path) == []


@pytest.mark.slow
def test_a_run_that_fails_says_no_secret(tmp_path: Path):
    done = start(tmp_path, f"+trainer.hf_token={MARK}-unknown-06", "trainer.total_epochs=no")
    assert done.returncode == 2
    assert "trainer.hf_token=***: there is no such key" in done.stderr
    assert MARK not in done.stdout + done.stderr
    assert leaks(tmp_path) == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray's sockets cannot have long paths."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_run_on_ray_leaves_no_secret_in_its_logs(tmp_path: Path, short_folder: Path):
    done = start(tmp_path, "trainer.controller=ray", ray_folder=short_folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert MARK not in done.stdout + done.stderr
    assert leaks(tmp_path) == []
    assert list(short_folder.rglob("raylet.out"))
    assert leaks(short_folder) == []
