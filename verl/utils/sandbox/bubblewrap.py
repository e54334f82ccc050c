"""The walls: how bubblewrap is called, and the proof that they stand on this machine.

There are three ways to the same walls, tried in this order:

``own_uid``      as root: no user namespace; the program runs under a uid of its own, new for every run.
``own_uid_user`` as root without CAP_SYS_ADMIN (a usual container): bubblewrap itself runs under that uid.
``user``         as anybody: a user namespace that maps the caller to nobody.

A uid of one's own, or a user namespace, is what makes the kernel count processes per run. Root alone
would be exempt from that limit.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl.utils.sandbox.seccomp import ARCHITECTURES
from verl.utils.sandbox.types import Limits

INSTALL = "apt-get install bubblewrap"
OLDEST = (0, 7)
"""First bubblewrap that can limit the size of /tmp."""
NOBODY = 65534
MIB = 1 << 20
PROGRAM = "/sandbox/program.py"
TOOLS = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # every arena reserves 64 MiB of address space, which the memory limit counts
    "PATH": "/usr/bin",
    "PYTHONHASHSEED": "0",  # the same program, the same answer
    "TMPDIR": "/tmp",
}
FEWEST_IDS = 1 << 16
"""Ids of a user namespace, below which there is none to spare."""

Way = Literal["own_uid", "own_uid_user", "user"]

ADVICE = (
    (
        r"(No permissions to create|Creating) new namespace|setting up uid map|No permissions to creat",
        "this account may not create namespaces",
    ),
    (
        r"Can't mount proc",
        "the container hides parts of /proc: start it with --security-opt systempaths=unconfined",
    ),
    (
        r"loopback|RTM_NEW",
        "namespaces are restricted: on Ubuntu, sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give "
        "/usr/bin/bwrap an AppArmor profile that allows 'userns'",
    ),
    (
        r"Can't find source path|execvp|No such file",
        "the interpreter cannot be read by the account of the sandbox: use one that all users can read, such as "
        "/usr/bin/python3, or install the environment outside /root",
    ),
)
"""What bubblewrap says on failing, and what is to be done."""


@dataclass(frozen=True)
class Walls:
    """One way to build the sandbox on this machine."""

    way: Way
    bwrap: str
    prlimit: str
    setpriv: str | None

    def command(self, limits: Limits, uid: int, program_fd: int, filter_fd: int, status_fd: int) -> list[str]:
        """The call of bubblewrap that runs the program behind ``program_fd``.

        Args:
            limits: what the run may use.
            uid: uid of the run; see :meth:`new_uid`.
            program_fd: open file with the source of the program.
            filter_fd: open file with the system-call filter.
            status_fd: where bubblewrap writes the pid and the exit code.
        """
        files = str(limits.max_files_mb * MIB)
        command = [self.bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        if self.way == "own_uid":
            command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        command += ["--clearenv", *_flatten(("--setenv", *pair) for pair in ENVIRONMENT.items())]
        command += interpreter_mounts()
        command += [
            "--perms",
            "0755",
            "--dir",
            "/sandbox",
            "--perms",
            "0444",
            "--ro-bind-data",
            str(program_fd),
            PROGRAM,
        ]
        # Process 1 is bubblewrap itself: in a user namespace it has the program's uid, but not its limits.
        command += ["--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--dev", "/dev"]
        command += ["--perms", "1777", "--size", files, "--tmpfs", "/tmp"]
        command += ["--perms", "1777", "--size", files, "--tmpfs", "/dev/shm"]
        # Terminals come from a number that the whole machine shares.
        command += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts", "--remount-ro", "/dev"]
        command += ["--remount-ro", "/", "--chdir", "/tmp"]
        command += ["--seccomp", str(filter_fd), "--json-status-fd", str(status_fd), "--"]
        return command + self._limited(limits, uid) + [_interpreter(), "-s", "-B", PROGRAM]

    def _limited(self, limits: Limits, uid: int) -> list[str]:
        # In a user namespace the kernel counts bubblewrap's own process 1 with the program's.
        own = 0 if self.way == "own_uid" else 1
        memory, files = limits.memory_mb * MIB, limits.max_files_mb * MIB
        command = [self.prlimit, "--core=0"]
        command += [f"--as={_at_most(resource.RLIMIT_AS, memory)}"]
        command += [f"--data={_at_most(resource.RLIMIT_DATA, memory)}"]
        command += [f"--nproc={_at_most(resource.RLIMIT_NPROC, limits.max_processes + own)}"]
        command += [f"--fsize={_at_most(resource.RLIMIT_FSIZE, files)}"]
        command += [f"--nofile={_at_most(resource.RLIMIT_NOFILE, limits.max_open_files)}"]
        command += [f"--msgqueue={_at_most(resource.RLIMIT_MSGQUEUE, 0)}"]
        # A program may handle SIGXCPU; one second later the kernel kills it.
        hard_cpu = _at_most(resource.RLIMIT_CPU, limits.cpu_s + 1)
        command += [f"--cpu={min(limits.cpu_s, hard_cpu)}:{hard_cpu}"]
        # Threads reserve the soft limit; programs that recurse deeply raise it for themselves.
        hard_stack = _at_most(resource.RLIMIT_STACK, memory // 2)
        command += [f"--stack={min(8 * MIB, hard_stack)}:{hard_stack}"]
        if self.way == "own_uid" and self.setpriv:
            command += [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
        return command

    def new_uid(self) -> int:
        """A uid that nobody has, drawn anew for every run, so that runs cannot count or signal each other's.

        It comes from the upper half of the ids of this user namespace; ``user`` has no use for one.
        """
        last = _last_uid()
        return NOBODY if self.way == "user" else random.SystemRandom().randint(last // 2, last - 2)


def find_walls() -> tuple[list[Walls], str | None]:
    """Ways to build the sandbox that this account may try, and, where there is none, what is missing."""
    if missing := _missing():
        return [], missing
    bwrap, prlimit, setpriv = (shutil.which(tool, path=_path()) for tool in ("bwrap", "prlimit", "setpriv"))
    assert bwrap
    assert prlimit
    ways: list[Way] = ["user"]
    if os.geteuid() == 0 and _last_uid() >= FEWEST_IDS - 1:
        ways = ["own_uid", "own_uid_user", "user"] if setpriv else ["own_uid_user", "user"]
    return [Walls(way, bwrap, prlimit, setpriv) for way in ways], None


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"the sandbox is made of Linux namespaces, and this is {sys.platform}"
    if platform.machine() not in ARCHITECTURES:
        return f"the system-call filter knows {', '.join(ARCHITECTURES)}, and this is {platform.machine()}"
    bwrap = shutil.which("bwrap", path=_path())
    if bwrap is None:
        return f"bubblewrap is not installed: {INSTALL}"
    if (version := _version(bwrap)) < OLDEST:
        return (
            f"bubblewrap {'.'.join(map(str, version))} is too old, {'.'.join(map(str, OLDEST))} or newer is needed "
            f"(Debian 12, Ubuntu 23.04): upgrade, then {INSTALL}"
        )
    if shutil.which("prlimit", path=_path()) is None:
        return "prlimit is not installed: apt-get install util-linux"
    return None


def why_unavailable(complaints: list[str]) -> str:
    """What to do about the complaints of bubblewrap or of the proof of its walls, one per way tried."""
    text = "\n".join(complaints)
    causes = [advice for pattern, advice in ADVICE if re.search(pattern, text)]
    causes += _kernel_settings()
    return f"bubblewrap is installed but cannot build the sandbox here: {'; '.join(causes) or 'see below'}.\n{text}"


def _kernel_settings() -> Iterator[str]:
    """Settings of this machine that forbid namespaces, each with its remedy."""
    if _setting("kernel/unprivileged_userns_clone") == 0:
        yield "kernel.unprivileged_userns_clone is 0: sysctl -w kernel.unprivileged_userns_clone=1"
    if _setting("user/max_user_namespaces") == 0:
        yield "user.max_user_namespaces is 0: sysctl -w user.max_user_namespaces=10000"
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == 1:
        yield (
            "kernel.apparmor_restrict_unprivileged_userns is 1: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for /usr/bin/bwrap"
        )
    if re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE):
        yield (
            "this process lives under a system-call filter, as in a container: start it with "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, or with --privileged"
        )


def _setting(name: str) -> int | None:
    path = Path("/proc/sys") / name
    return int(path.read_text()) if path.exists() else None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{TOOLS}"


def _version(bwrap: str) -> tuple[int, ...]:
    text = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _at_most(kind: int, value: int) -> int:
    """A limit, or that which already holds for this process if it is lower: a limit cannot be raised."""
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


@functools.cache
def _last_uid() -> int:
    """The highest uid that exists in this user namespace."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return min(max(first + count - 1 for first, _, count in ranges), 2**31 - 1)


@functools.cache
def _interpreter() -> str:
    """The interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def interpreter_mounts() -> list[str]:
    """Arguments that make the interpreter, its standard library and the C libraries visible, and nothing else.

    Installed packages are hidden: what a program may import does not depend on the machine.
    """
    mounts: list[str] = []
    for top in ("/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(top):
            mounts += ["--symlink", os.readlink(top), top]
        elif os.path.isdir(top):
            mounts += ["--ro-bind", top, top]
    libraries = [f"/usr/{name}" for name in ("lib", "lib32", "lib64", "libx32")]
    places = [*libraries, "/etc/ld.so.cache", f"{sys.base_prefix}/lib", sysconfig.get_path("stdlib"), _interpreter()]
    places += [tool for name in ("prlimit", "setpriv") if (tool := shutil.which(name, path=_path()))]
    visible: list[Path] = []
    for place in sorted({Path(place).resolve() for place in places if os.path.exists(place)}):
        if not any(place.is_relative_to(other) for other in visible):
            visible.append(place)
    parents = {parent for place in visible for parent in place.parents} - {Path("/")}
    # bubblewrap would make them for its own account alone.
    mounts += _flatten(("--perms", "0755", "--dir", str(parent)) for parent in sorted(parents))
    mounts += _flatten(("--ro-bind", str(place), str(place)) for place in visible)
    for packages in _package_folders():
        mounts += ["--tmpfs", packages, "--remount-ro", packages]
    return mounts


def _package_folders() -> list[str]:
    variables = {"base": sys.base_prefix, "platbase": sys.base_prefix, "installed_base": sys.base_prefix}
    found = [sysconfig.get_path(name, vars=variables) for name in ("purelib", "platlib")]
    major, minor = sys.version_info[:2]
    for prefix in (sys.base_prefix, "/usr", "/usr/local"):
        found += [f"{prefix}/lib/python3/dist-packages", f"{prefix}/lib/python{major}.{minor}/dist-packages"]
        found += [f"{prefix}/lib/python{major}.{minor}/site-packages"]
    visible = (f"{os.path.realpath(sys.base_prefix)}/lib/", "/usr/lib/")
    return [
        folder
        for folder in dict.fromkeys(os.path.realpath(path) for path in found)
        if os.path.isdir(folder) and folder.startswith(visible)
    ]


def _flatten(groups: Iterator[tuple[str, ...]]) -> list[str]:
    return [word for group in groups for word in group]
