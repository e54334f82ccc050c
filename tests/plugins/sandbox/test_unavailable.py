"""Where no sandbox can be built, nothing runs, and the message says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from verl.plugins.sandbox import bubblewrap, find_setups, why_unavailable

ROOT = Path(__file__).parents[3]
TRY = (
    "from verl.plugins.sandbox import Sandbox, SandboxUnavailableError, bubblewrap\n"
    "{}\n"
    "try:\n    print('RAN', Sandbox().run('print(1)').stdout)\n"
    "except SandboxUnavailableError as error:\n    print('REFUSED', error)"
)


def tell(before: str = "", **environment: str) -> str:
    """What a fresh process says when it builds a sandbox."""
    done = subprocess.run(
        [sys.executable, "-c", TRY.format(before)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_bubblewrap_the_message_has_the_command(tmp_path):
    said = tell("bubblewrap.TOOLS = '/nowhere'", PATH=str(tmp_path))
    assert said.startswith("REFUSED")
    assert "apt-get install bubblewrap" in said


def fake_bwrap(folder: Path, version: str, complaint: str) -> str:
    """A program called bwrap that fails as the real one does on a machine without namespaces."""
    path = folder / "bwrap"
    version_only = f'if [ "$1" = --version ]; then echo "bubblewrap {version}"; exit; fi'
    path.write_text(f'#!/bin/sh\n{version_only}\necho "{complaint}" >&2\nexit 1\n')
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_an_old_bubblewrap_is_refused(tmp_path):
    said = tell(PATH=fake_bwrap(tmp_path, "0.6.1", "x"))
    assert said.startswith("REFUSED")
    assert "0.6 is too old, 0.7" in said


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("bwrap: No permissions to create new namespace, likely because", "may not create namespaces"),
        ("bwrap: Creating new namespace failed: Operation not permitted", "may not create namespaces"),
        ("bwrap: setting up uid map: Permission denied", "may not create namespaces"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "apparmor_restrict_unprivileged_userns=0"),
        ("bwrap: Can't find source path /root/x/lib: Permission denied", "that all users can read"),
    ],
)
def test_a_failing_bubblewrap_is_explained(tmp_path, complaint, advice):
    said = tell(PATH=fake_bwrap(tmp_path, "0.8.0", complaint))
    assert said.startswith("REFUSED")
    assert advice in said
    assert complaint in said


def test_kernel_settings_are_named(monkeypatch):
    settings = {
        "kernel/unprivileged_userns_clone": 0,
        "user/max_user_namespaces": 0,
        "kernel/apparmor_restrict_unprivileged_userns": 1,
    }
    monkeypatch.setattr(bubblewrap, "_setting", settings.get)
    said = why_unavailable(["user: bwrap failed"])
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in said
    assert "sysctl -w user.max_user_namespaces=" in said
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in said


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(bubblewrap.platform, "machine", lambda: "riscv64")
    ways, missing = find_setups()
    assert not ways
    assert "riscv64" in missing
    monkeypatch.setattr(bubblewrap.sys, "platform", "darwin")
    assert "darwin" in find_setups()[1]


@pytest.mark.parametrize(
    ("weakness", "complaint"),
    [
        ("--unshare-net", "sees a network"),
        ("--remount-ro", "could write to"),
        ("--unshare-pid", "pid"),
        ("--nproc=", "a process limit does not hold"),
        (("--as=", "--data="), "out_of_memory"),
        ("--seccomp", "could make a namespace"),
        ("setpriv", "root"),
    ],
)
@needs_sandbox
def test_the_probe_finds_a_wall_that_is_missing(weakness, complaint):
    """Each wall taken away in turn: the sandbox is refused, not used."""
    if weakness == "setpriv" and os.geteuid() != 0:
        pytest.skip("only root changes the uid by setpriv")
    said = tell(WEAKEN.format(weakness=weakness))
    assert said.startswith("REFUSED"), said
    assert complaint in said


WEAKEN = """
whole = bubblewrap.BubblewrapSetup.command
def weakened(self, limits, *args):
    command = whole(self, limits, *args)
    if {weakness!r} == "--remount-ro":
        places = [i for i, word in enumerate(command) if word == "--remount-ro"]
        command = [word for i, word in enumerate(command) if i not in places and i - 1 not in places]
    elif {weakness!r} == "--seccomp":
        place = command.index("--seccomp")
        del command[place:place + 2]
    elif isinstance({weakness!r}, tuple) or {weakness!r}.endswith("="):
        command = [word for word in command if not word.startswith({weakness!r})]
    elif {weakness!r} == "setpriv":
        last = len(command) - 1 - command[::-1].index(self.setpriv)
        del command[last:last + 5]
    else:
        command.remove({weakness!r})
    return command
bubblewrap.BubblewrapSetup.command = weakened
"""
