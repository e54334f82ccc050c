"""``verl doctor`` on this machine, whose Python and packages run these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from verl.cli import doctor

ROOT = Path(__file__).parents[2]


def test_findings_as_json():
    command = [sys.executable, "-m", "verl", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["Python"]["verdict"] == "ok"
    assert findings["torch"]["found"].startswith("2.")
    assert {"GPUs", "bubblewrap", "disk", "open files", "vLLM"} <= set(findings)
    assert done.returncode == any(finding["verdict"] == "fail" for finding in findings.values())
    assert all(finding["remedy"] for finding in findings.values() if finding["verdict"] in ("warn", "fail"))


def test_a_package_that_is_too_old_or_absent_is_told_with_its_remedy(monkeypatch):
    wanted = ["numpy>=999", "no-such-package>=1", "pytest>=1"]
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement(text) for text in wanted])
    found = {finding.name: finding for finding in doctor._packages()}
    assert (found["numpy"].verdict, found["numpy"].remedy) == ("warn", "pip install 'numpy>=999'")
    assert (found["no-such-package"].verdict, found["pytest"].verdict) == ("fail", "ok")


def test_too_little_of_something_is_a_warning():
    assert doctor._enough("disk", 2**30, 2 * 2**30, "free space").verdict == "warn"
    assert doctor._enough("disk", 2**31, 2 * 2**30, "free space").verdict == "ok"
