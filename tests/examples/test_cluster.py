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
from collections.abc import Iterator
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
    assert bases["sglang"] == "${CUDA_IMAGE}"  # a build argument, so that a digest can be given
    assert re.search(r"^ARG CUDA_IMAGE=nvidia/cuda:13\.[\d.]+-devel-ubuntu24\.04$", text, re.MULTILINE)


def test_the_job_of_kubernetes_asks_for_the_gpus_that_its_command_names():
    spec = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())["spec"]
    [workers] = spec["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert f"trainer.nnodes={workers['replicas']} " in spec["entrypoint"]
    assert f"trainer.n_gpus_per_node={container['resources']['limits']['nvidia.com/gpu']} " in spec["entrypoint"]
    assert "adv_estimator=grpo " in spec["entrypoint"]
    assert re.search(r"rollout\.n=([2-9]|\d\d)", spec["entrypoint"]), "GRPO compares several responses"


SLURM = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort=36817
SlurmdPort=36818
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of this machine alone; its programs end with the test."""
    if os.getuid() != 0 or not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))):
        pytest.skip("needs root and apt-get install slurm-wlm munge")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    os.chmod(folder, 0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    host = os.uname().nodename.partition(".")[0]
    (folder / "slurm.conf").write_text(SLURM.format(host=host, folder=folder, cpus=1))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    processes = []
    try:
        for command in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("w") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            time.sleep(2)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_for_slurm_trains_on_the_nodes_of_its_allocation(tmp_path: Path, slurm: dict[str, str]):
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # python3 and ray
    environment = slurm | {"PATH": programs, "PYTHONPATH": str(ROOT), "RAY_PORT": PORT, "RAY_TMPDIR": "/tmp"}
    log = tmp_path / "job.log"
    words = ["sbatch", "--wait", f"--output={log}", str(CLUSTER / "slurm.sh"), *settings(tmp_path)]
    job = subprocess.run(
        [*words, "trainer.n_gpus_per_node=1"], env=environment, cwd=ROOT, timeout=500, check=False, capture_output=True
    )
    assert job.returncode == 0, job.stderr.decode() + log.read_text()[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"


def user(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has no token yet, and whose commands find an installed verl in any folder."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    for name, does in {"python3": sys.executable, "ray": f"{sys.executable} {RAY}"}.items():
        (home / "bin" / name).write_text(f'#!/bin/bash\nexec {does} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"}


def until_it_says(text: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if text in log.read_text():
            return
        time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


def lines_of_page(heading: str) -> list[list[str]]:
    """The commands of a section of docs/multi_node.md, each as its words without comments."""
    section = (ROOT / "docs/multi_node.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_that_are_started_by_hand_train_as_the_page_says(tmp_path: Path):
    token, export, head, other, train = lines_of_page("Manually")
    environment = user(tmp_path)
    environment |= dict([export[1].split("=")])
    subprocess.run(token, env=environment, check=True, stdout=subprocess.DEVNULL)
    nodes = []
    try:
        for words in (head, other):
            words = [word.replace("FIRST", "127.0.0.1").replace("6379", PORT) for word in words]
            # With --block they end their own processes and no others, as `ray stop` would.
            with (tmp_path / f"node{len(nodes)}").open("w") as out:
                start = [*words, "--block", "--num-cpus=1"]
                nodes.append(subprocess.Popen(start, env=environment, cwd=tmp_path, stdout=out, stderr=out))
            until_it_says("Ray runtime started", tmp_path / f"node{len(nodes) - 1}", nodes[-1])
        assert train[:4] == ["RAY_ADDRESS=auto", "python3", "-m", "verl.trainer.main_ppo"]
        assert train[4] == "trainer.nnodes=2"
        environment["RAY_ADDRESS"] = f"127.0.0.1:{PORT}"  # there may be other clusters on this machine
        command = [*train[1:5], *settings(tmp_path), "trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(timeout=60)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_ray_trains_as_the_page_says(tmp_path: Path):
    pytest.importorskip("aiohttp_cors", reason="pip install 'ray[default]'")
    token, *_ = lines_of_page("Manually")
    install, *exports, submit, logs = lines_of_page("As a Ray job")
    assert install == ["pip", "install", "ray[default]"]
    environment = user(tmp_path)
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
