"""``verl doctor`` on this machine, whose Python and packages run these tests."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import forks
from verl.cli import doctor

ROOT = Path(__file__).parents[2]


def test_findings_as_json():
    done = forks.run(["-m", "verl", "doctor", "--json"], cwd=ROOT)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["Python"]["verdict"] == "ok"
    assert findings["torch"]["found"].startswith("2.")
    assert {"GPUs", "bubblewrap", "disk", "open files", "processes", "vLLM", "flash-attn"} <= set(findings)
    assert done.returncode == any(finding["verdict"] == "fail" for finding in findings.values())
    assert all(finding["remedy"] for finding in findings.values() if finding["verdict"] in ("warn", "fail"))


def test_a_package_that_is_too_old_or_absent_is_told_with_its_remedy(monkeypatch):
    wanted = ["numpy>=999", "no-such-package>=1", "pytest>=1"]
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement(text) for text in wanted])
    found = {finding.name: finding for finding in doctor._packages()}
    assert (found["numpy"].verdict, found["numpy"].remedy) == ("warn", "pip install 'numpy>=999'")
    assert (found["no-such-package"].verdict, found["pytest"].verdict) == ("fail", "ok")


@pytest.mark.parametrize(
    "cuda, driver, remedy",
    [
        (None, "575.57.08", "install the build of PyTorch for this driver"),
        ("13.0", "575.57.08", "PyTorch for CUDA 13.0 needs driver R580 or newer: update the driver, or install"),
        ("13.0", "580.65.06", "look at CUDA_VISIBLE_DEVICES"),
        ("12.8", "525.60.13", "look at CUDA_VISIBLE_DEVICES"),
        ("12.8", "470.82.01", "PyTorch for CUDA 12.8 needs driver R525 or newer: update the driver, or install"),
        ("6.4.43482", "6.12.12", "look at CUDA_VISIBLE_DEVICES"),  # ROCm
    ],
)
def test_a_driver_that_is_too_old_for_the_build_of_pytorch_is_told(cuda, driver, remedy):
    assert doctor.unseen_gpu_remedy(cuda, driver).startswith(remedy)


def test_too_little_of_something_is_a_warning():
    assert doctor._enough("disk", 2**30, 2 * 2**30, "free space").verdict == "warn"
    assert doctor._enough("disk", 2**31, 2 * 2**30, "free space").verdict == "ok"
    small = doctor._shared_memory(16 * 2**30, 1000 * 2**30)
    assert (small.verdict, small.remedy) == ("warn", "mount /dev/shm larger (docker run --shm-size=400g)")
    assert doctor._shared_memory(500 * 2**30, 1000 * 2**30).verdict == "ok"


def test_a_folder_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    for folder, verdict in ((tmp_path, "ok"), (Path("/proc"), "warn")):
        monkeypatch.chdir(folder)
        (found,) = (finding for finding in doctor._limits() if finding.name == "this folder")
        assert found.verdict == verdict
        assert bool(found.remedy) == (verdict == "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_limit_is_raised_by_a_command_up_to_its_hard_value():
    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    below = soft - 1
    resource.setrlimit(kind, (below, hard))
    try:
        assert doctor._limit("files", kind, below, "ulimit -n").verdict == "ok"
        found = doctor._limit("files", kind, soft, "ulimit -n")
        assert (found.verdict, found.found, found.remedy) == ("warn", f"{below:,}", "ulimit -n")
        if hard != resource.RLIM_INFINITY:
            for wanted in (hard + 1, resource.RLIM_INFINITY):
                assert f"raise the hard limit of {hard:,}" in doctor._limit("files", kind, wanted, "ulimit -n").remedy
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    "program, verdict, found",
    [
        ("print('any')", "ok", "it works"),
        ("import no_such_module", "warn", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('why\\n\\nSet A=1 for more')", "warn", "ValueError: why"),
        ("import sys; sys.exit('no compiler: slower\\nmore')", "warn", "no compiler: slower"),
        ("import os; os.abort()", "warn", "ended with code -6"),
        ("import time; time.sleep(60)", "warn", "no end after 1 s"),
    ],
)
def test_what_a_program_says_when_it_fails_is_the_finding(monkeypatch, program, verdict, found):
    monkeypatch.setattr(doctor, "SECONDS", 60 if "sleep" not in program else 1)
    finding = doctor._ran("it", program, "it works", "mend it")
    assert (finding.verdict, finding.found) == (verdict, found)
    assert finding.remedy == ("" if verdict == "ok" else "mend it")


def test_kernels_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = doctor._ran("CPU kernels", doctor._COMPILE_FOR_CPU, "compiled", "apt-get install gcc")
    assert (finding.verdict, finding.remedy) == ("warn", "apt-get install gcc")
    assert finding.found.startswith("no C compiler (/no/such/compiler)")


@pytest.mark.slow
def test_a_function_is_compiled_by_torch(monkeypatch):
    program = doctor._COMPILE_FOR_GPU.replace("cuda", "cpu")
    assert doctor._ran("compiler", program, "compiled", "").verdict == "ok"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "No working C++ compiler found" in doctor._ran("compiler", program, "compiled", "").found


def test_flash_attention_needs_a_gpu_that_it_supports(monkeypatch):
    monkeypatch.setattr(doctor, "_optional", lambda name, *_: doctor.Finding(name, "ok", "2.8.3"))
    assert doctor._flash_attention(None).found == "2.8.3; of no use without a GPU"
    assert doctor._flash_attention([7, 5]).found == "2.8.3; this GPU has 7.5"
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # as a Python that cannot import it
    assert doctor._flash_attention([8, 0]).found == "ended with code 1"
