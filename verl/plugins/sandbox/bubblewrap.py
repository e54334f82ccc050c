"""The bubblewrap command of a sandboxed run, and the probe that tests whether its isolation works here.

Three setups give the same isolation; they are tried in this order:

``own_uid``      for root: no user namespace; the program runs under a uid that is new for every run.
``own_uid_user`` for root without CAP_SYS_ADMIN (a usual container): bubblewrap itself runs under that uid.
``user``         for any account: a user namespace that maps the caller to ``nobody``.

The separate uid or user namespace makes the kernel count processes per run; root is exempt from that limit.
"""

from __future__ import annotations

import functools
import json
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

from verl.plugins.sandbox.seccomp import MACHINES, filter_program
from verl.plugins.sandbox.types import Limits, ProgramResult

INSTALL = "apt-get install bubblewrap"
OLDEST = (0, 7)
"""First bubblewrap that can limit the size of /tmp."""
NOBODY = 65534  # the id of Linux for a user without rights
MIB = 1 << 20
PROGRAM = "/sandbox/program.py"  # inside the sandbox
TOOLS = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"  # searched after PATH, which may lack them
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # every arena reserves 64 MiB of address space, which the memory limit counts
    "PATH": "/usr/bin",
    "PYTHONHASHSEED": "0",  # a program gives the same answer in every run
    "TMPDIR": "/tmp",
}
FEWEST_IDS = 1 << 16
"""A user namespace with fewer ids than this has no free uid for a run."""

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
"""Regular expressions for bubblewrap's error messages, each with its remedy."""


@dataclass(frozen=True)
class BubblewrapSetup:
    """A setup of bubblewrap that this machine may support."""

    way: Way
    bwrap: str
    prlimit: str
    setpriv: str | None

    def command(self, limits: Limits, uid: int, program_fd: int, filter_fd: int, status_fd: int) -> list[str]:
        """Build the command line that runs the program in ``program_fd``.

        Args:
            limits: limits of the run.
            uid: uid of the run; see :meth:`new_uid`.
            program_fd: open file with the source of the program.
            filter_fd: open file with the system-call filter.
            status_fd: pipe to which bubblewrap writes the pid of process 1 and the exit code, as JSON lines.
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
        # Process 1 is bubblewrap itself. In a user namespace it has the program's uid but not its limits, so hide it.
        command += ["--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--dev", "/dev"]
        command += ["--perms", "1777", "--size", files, "--tmpfs", "/tmp"]
        command += ["--perms", "1777", "--size", files, "--tmpfs", "/dev/shm"]
        # The number of pseudo-terminals is limited for the whole machine: a program could use them all up.
        command += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts", "--remount-ro", "/dev"]
        command += ["--remount-ro", "/", "--chdir", "/tmp"]
        command += ["--seccomp", str(filter_fd), "--json-status-fd", str(status_fd), "--"]
        return command + self._limited(limits, uid) + [_interpreter(), "-s", "-B", PROGRAM]

    def _limited(self, limits: Limits, uid: int) -> list[str]:
        # In a user namespace the kernel counts bubblewrap's own process 1 with the program's.
        own_processes = 0 if self.way == "own_uid" else 1
        memory, files = limits.memory_mb * MIB, limits.max_files_mb * MIB
        command = [self.prlimit, "--core=0"]
        command += [f"--as={_at_most(resource.RLIMIT_AS, memory)}"]
        command += [f"--data={_at_most(resource.RLIMIT_DATA, memory)}"]
        command += [f"--nproc={_at_most(resource.RLIMIT_NPROC, limits.max_processes + own_processes)}"]
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
        """Draw a random unused uid, so that runs neither share a process count nor can signal each other.

        It comes from the upper half of the ids of this user namespace. ``user`` needs none and gets ``nobody``.
        """
        last = _last_uid()
        return NOBODY if self.way == "user" else random.SystemRandom().randint(last // 2, last - 2)


def find_setups() -> tuple[list[BubblewrapSetup], str | None]:
    """Return the setups that this account may try, and what is missing if there are none."""
    if missing := _missing():
        return [], missing
    bwrap, prlimit, setpriv = (shutil.which(tool, path=_path()) for tool in ("bwrap", "prlimit", "setpriv"))
    assert bwrap
    assert prlimit
    ways: list[Way] = ["user"]
    if os.geteuid() == 0 and _last_uid() >= FEWEST_IDS - 1:
        ways = ["own_uid", "own_uid_user", "user"] if setpriv else ["own_uid_user", "user"]
    return [BubblewrapSetup(way, bwrap, prlimit, setpriv) for way in ways], None


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"the sandbox is made of Linux namespaces, and this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"the system-call filter knows {', '.join(MACHINES)}, and this is {platform.machine()}"
    try:
        filter_program(platform.machine())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        remedy = "pip install pyseccomp, apt-get install libseccomp2"
        return f"the system-call filter cannot be made ({error}): {remedy}"
    bwrap = shutil.which("bwrap", path=_path())
    if bwrap is None:
        return f"bubblewrap is not installed: {INSTALL}"
    text = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if version < OLDEST:
        return (
            f"bubblewrap {'.'.join(map(str, version))} is too old, {'.'.join(map(str, OLDEST))} or newer is needed "
            f"(Debian 12, Ubuntu 23.04): upgrade, then {INSTALL}"
        )
    for tool, package in (("prlimit", "util-linux"), ("ldd", "libc-bin")):
        if shutil.which(tool, path=_path()) is None:
            return f"{tool} is not installed: apt-get install {package}"
    return None


def why_unavailable(complaints: list[str]) -> str:
    """Explain failed setups: the error of bubblewrap or of the probe for each, and the remedies."""
    text = "\n".join(complaints)
    causes = [advice for pattern, advice in ADVICE if re.search(pattern, text)]
    causes += _kernel_settings()
    return f"bubblewrap is installed but cannot build the sandbox here: {'; '.join(causes) or 'see below'}.\n{text}"


def _kernel_settings() -> Iterator[str]:
    """Yield each kernel setting that forbids namespaces, with its remedy."""
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


def _at_most(kind: int, value: int) -> int:
    # An unprivileged process cannot raise its hard limit.
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


@functools.cache
def _last_uid() -> int:
    """Highest uid of this user namespace."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return min(max(first + count - 1 for first, _, count in ranges), 2**31 - 1)


@functools.cache
def _interpreter() -> str:
    """Path of the interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def interpreter_mounts() -> list[str]:
    """Return bubblewrap arguments that mount the interpreter, its standard library and the C libraries of both only.

    Installed packages and all other programs are hidden, so that what a program can import and run does not depend on
    the machine.
    """
    mounts: list[str] = []
    for top in ("/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(top):
            mounts += ["--symlink", os.readlink(top), top]
    tools = [tool for name in ("prlimit", "setpriv") if (tool := shutil.which(name, path=_path()))]
    executables = [_interpreter(), *map(os.path.realpath, tools)]
    standard = {Path(folder).resolve() for folder in _standard_library()}
    libraries = _library_folders([*executables, *_extensions(standard)])
    caches = [path for path in [Path("/etc/ld.so.cache")] if path.exists()]
    visible: list[Path] = []
    for path in sorted({*standard, *libraries, *map(Path, executables), *caches}):
        if not any(path.is_relative_to(other) for other in visible):
            visible.append(path)
    parents = {parent for path in visible for parent in path.parents} - {Path("/")}
    # bubblewrap would make them for its own account alone.
    mounts += _flatten(("--perms", "0755", "--dir", str(parent)) for parent in sorted(parents))
    mounts += _flatten(("--ro-bind", str(path), str(path)) for path in visible)
    hidden = [folder / name for folder in standard for name in ("dist-packages", "site-packages")]
    for folder in libraries:
        hidden += [each for each in folder.iterdir() if _has_programs(each) and each not in {*standard, *libraries}]
    for path in hidden:
        if path.is_dir():
            mounts += ["--tmpfs", str(path), "--remount-ro", str(path)]
    return mounts


def _standard_library() -> set[str]:
    variables = {"installed_base": sys.base_prefix, "platbase": sys.base_prefix, "installed_platbase": sys.base_prefix}
    return {sysconfig.get_path(name, vars=variables) for name in ("stdlib", "platstdlib")}


def _extensions(standard: set[Path]) -> Iterator[str]:
    """Yield the extension modules of the standard library that have libraries of their own."""
    for folder in standard:
        for name in ("_bz2", "_ctypes", "_lzma", "_sqlite3", "_ssl", "zlib"):
            yield from map(str, folder.glob(f"lib-dynload/{name}.*"))


def _library_folders(binaries: list[str]) -> set[Path]:
    """Folders of the shared libraries that binaries load, as the loader looks for them and where their files are."""
    ldd = shutil.which("ldd", path=_path())
    assert ldd
    # It fails as a whole where one of them is statically linked; the search path is that of the sandbox.
    text = subprocess.run([ldd, *binaries], capture_output=True, text=True, check=False, env={"PATH": TOOLS}).stdout
    paths = {Path(word) for line in text.splitlines() for word in line.split() if re.match(r"/.*\.so", word)}
    return {folder.resolve() for path in paths for folder in (path.parent, path.resolve().parent)}


def _has_programs(folder: Path) -> bool:
    """Whether a folder has executable files besides libraries, as those of compilers."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return any(
        ".so" not in name and os.path.isfile(path := os.path.join(top, name)) and os.access(path, os.X_OK)
        for top, _, names in os.walk(folder)
        for name in names
    )


def _flatten(groups: Iterator[tuple[str, ...]]) -> list[str]:
    return [word for group in groups for word in group]


# ---- the probe -----------------------------------------------------------------------------------

PROBE_LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_mb=256, max_processes=4)

PROBE = """
import ctypes, errno, json, os

found = {"names": sorted(os.listdir("/")), "environment": sorted(os.environ), "pid": os.getpid()}
found["uid"] = os.getuid()
found["capabilities"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")]
found["privileges"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")]
found["links"] = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
found["writable"] = [p for p in ("/", "/usr", "/dev", "/sandbox") if not os.statvfs(p).f_flag & os.ST_RDONLY]
children = 0
pipe = os.pipe()
try:
    while children < 20:
        if os.fork() == 0:
            os.close(pipe[1])
            os.read(pipe[0], 1)
            os._exit(0)
        children += 1
except OSError as error:
    found["fork_error"] = errno.errorcode[error.errno]
os.close(pipe[1])
found["children"] = children
try:
    bytearray(1 << 30)
    found["memory"] = "unlimited"
except MemoryError:
    found["memory"] = "limited"
found["unshare"] = ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
print(json.dumps(found))
"""


def complaint(result: ProgramResult) -> str | None:
    """Describe the isolation that failed, according to the result of ``PROBE``; None if all of it works."""
    if not result.ok:
        return f"the probe did not finish: {result.reason}"
    report = json.loads(result.stdout)
    checks = {
        "a process limit does not hold (Linux 5.14 or newer counts processes per user namespace)": (
            report["children"] != PROBE_LIMITS.max_processes - 1
        ),
        "the program runs as root": report["uid"] == 0,
        # CapInh, CapPrm and CapEff come first in /proc/self/status.
        "the program has capabilities": any(int(mask, 16) for mask in report["capabilities"][:3]),
        "the program could gain privileges": report["privileges"] != ["1"],
        "the program sees a network besides its own loopback": report["links"] not in ([], ["lo"]),
        f"the program could write to {report['writable']}": bool(report["writable"]),
        "a memory limit does not hold": report["memory"] != "limited",
        "the program could make a namespace": report["unshare"] == 0,
        # In a namespace of its own it has one of the first pids.
        "the program shares the pid namespace": report["pid"] > 100,
    }
    broken = [what for what, is_broken in checks.items() if is_broken]
    return f"{'; '.join(broken)} (probe: {result.stdout.strip()})" if broken else None
