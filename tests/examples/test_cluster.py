"""The files for clusters are sound, and those that can run on one machine train a model there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.testing.tiny_run import make_tiny_run, overrides

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RAY = Path(sys.executable).parent / "ray"
PORT = "26379"


def settings(tmp_path: Path) -> list[str]:
    apart = {
        "trainer__controller": "ray",
        "trainer__device": "cpu",
        "trainer__total_training_steps": 1,
        "trainer__save_freq": 1,
    }
    return overrides(make_tiny_run(tmp_path), tmp_path, **apart, trainer__default_local_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "command", [["shellcheck", str(CLUSTER / "slurm.sh")], ["hadolint", str(ROOT / "docker" / "Dockerfile.cuda")]]
)
def test_linters_have_nothing_to_say(command):
    tool = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool is not None, f"the extra `dev` brings {command[0]}"
    found = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_job_of_kubernetes_asks_for_the_gpus_that_its_command_names():
    spec = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())["spec"]
    [workers] = spec["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert f"trainer.nnodes={workers['replicas']} " in spec["entrypoint"]
    assert f"trainer.n_gpus_per_node={container['resources']['limits']['nvidia.com/gpu']} " in spec["entrypoint"]


@pytest.mark.slow
def test_the_script_for_slurm_trains_on_the_nodes_of_its_allocation(tmp_path: Path):
    stand_ins = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
        "python3": f'exec {sys.executable} "$@"',
        "ray": f'exec {RAY} "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, does in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "one",
        "SLURM_GPUS_ON_NODE": "1",
        "RAY_PORT": PORT,
        "RAY_TMPDIR": "/tmp",
    }
    run = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sh"), *settings(tmp_path)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"
