"""The files for clusters are sound, and those that can run on one machine train a model there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.support.tiny_run import make_tiny_run, overrides

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RAY = Path(sys.executable).parent / "ray"
PORT = "26379"
DASHBOARD = "28265"


def settings(tmp_path: Path, steps: int = 1) -> list[str]:
    apart = {
        "trainer__controller": "ray",
        "trainer__device": "cpu",
        "trainer__total_training_steps": steps,
        "trainer__save_freq": 1,
    }
    return overrides(make_tiny_run(tmp_path), tmp_path, **apart, trainer__default_local_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "command",
    [["shellcheck", str(CLUSTER / "slurm.sh")], *(["hadolint", str(file)] for file in sorted(ROOT.glob("docker/*")))],
)
def test_linters_have_nothing_to_say(command):
    tool = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool is not None, f"the extra `dev` brings {command[0]}"
    found = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_images_install_the_pinned_torch_before_anything_that_requires_one():
    """Else pip would take the build of the package index, which is for CUDA."""
    files = {file.name: file.read_text() for file in ROOT.glob("docker/*")}
    assert set(files) == {"Dockerfile.cuda", "Dockerfile.rocm"}
    for text in files.values():
        first, *_, last = re.findall(r"pip install (?:\\\n|[^&\n])*", text)
        assert "--constraint constraints.txt" in first
        assert first.split()[-1] == "torch"
        assert '".[$EXTRAS]"' in last
        assert text.index(first) < text.index("COPY . .") < text.index(last)


def test_the_image_with_sglang_has_the_compiler_that_it_runs():
    """SGLang compiles its activation function with nvcc when a model first runs; slim images have none."""
    text = (ROOT / "docker/Dockerfile.cuda").read_text()
    bases = {name: image for image, name in re.findall(r"^FROM (\S+) AS base-(\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"^ {8}(\w+)\) ", text, re.MULTILINE)) == set(bases) == {"none", "vllm", "sglang"}
    assert re.fullmatch(r"nvidia/cuda:13\.[\d.]+-devel-ubuntu24\.04", bases["sglang"])


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


def lines_of_page(heading: str) -> list[list[str]]:
    """The commands of a section of docs/cluster.md, each as its words without comments."""
    section = (ROOT / "docs/cluster.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_ray_trains_as_the_page_says(tmp_path: Path):
    pytest.importorskip("aiohttp_cors", reason="pip install 'ray[default]'")
    token, *_ = lines_of_page("Manually")
    install, *exports, submit, logs = lines_of_page("As a Ray job")
    assert install == ["pip", "install", "ray[default]"]
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    for name, does in {"python3": sys.executable, "ray": f"{sys.executable} {RAY}"}.items():
        (home / "bin" / name).write_text(f'#!/bin/bash\nexec {does} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    # The job runs in a folder of Ray's, as a user's would with an installed verl.
    environment = os.environ | {
        "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": "/tmp",
    }  # fmt: skip
    for export, assignment in exports:
        assert export == "export"
        name, _, value = assignment.partition("=")
        environment[name] = value.replace("FIRST:8265", f"127.0.0.1:{DASHBOARD}")
    assert set(environment) > {"RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"}

    def run(words: list[str]) -> str:
        done = subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    run(token)
    begin = submit.index("verl.trainer.main_ppo") + 1
    assert submit[begin:] == ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "..."]
    # With --block it ends its own processes and no others, as `ray stop` would.
    start = ["ray", "start", "--head", "--block", f"--port={PORT}", f"--dashboard-port={DASHBOARD}", "--num-cpus=2"]
    with subprocess.Popen(start, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) as head:
        try:
            wait_for_answer(f"http://127.0.0.1:{DASHBOARD}/api/version", head)
            run([*submit[:begin], *settings(tmp_path, steps=2)])
            said = run(logs)
        finally:
            head.terminate()
    assert "Job 'first' succeeded" in said, said[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"


def wait_for_answer(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait for any answer, a refusal too."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.HTTPError:
            return
        except urllib.error.URLError:
            time.sleep(0.5)
    pytest.fail(f"{server.args} ended with code {server.returncode}")
