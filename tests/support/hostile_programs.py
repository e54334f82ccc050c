"""Programs that mean harm, what each is to be reported as, and how to see that none was done."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from verl.plugins.sandbox import Limits, ProgramResult, Sandbox
from verl.plugins.sandbox.bubblewrap import PROGRAM
from verl.plugins.sandbox.runner import adopting_orphans
from verl.plugins.sandbox.watch import descendants

LIMITS = Limits(wall_s=3.0, cpu_s=1, memory_mb=256, max_processes=8, max_output_bytes=1 << 16, max_files_mb=16)
PATIENT = replace(LIMITS, wall_s=60.0)
SHORT = replace(LIMITS, wall_s=1.0)
"""Of programs that would never end: whatever they had begun by then has to end with them."""
"""For programs that do not wait for the clock: so a busy machine changes no status."""
SAFE = "nothing happened"
"""What a program prints if all that it tried was refused."""

TRY = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt):
    try:
        result = attempt()
    except (OSError, ImportError):
        return True
    return result == -1
def report(*attempts):
    done = [place for place, attempt in enumerate(attempts) if not refused(attempt)]
    print({SAFE!r} if not done else f"attempts that worked: {{done}}")
"""


@dataclass(frozen=True)
class HostileProgram:
    """A program, and the statuses that describe it truly."""

    name: str
    program: str
    statuses: tuple[str, ...]
    stdin: str = ""
    is_harmless: Callable[[ProgramResult], bool] = lambda outcome: True


def _printed_safe(outcome: ProgramResult) -> bool:
    return outcome.stdout.strip().splitlines()[-1:] == [SAFE]


def _trying(name: str, *attempts: str, before: str = "") -> HostileProgram:
    """A program that makes attempts, every one of which must be refused."""
    calls = ", ".join(f"lambda: {attempt}" for attempt in attempts)
    return HostileProgram(name, f"{TRY}\n{before}\nreport({calls})", ("ok",), stdin="input", is_harmless=_printed_safe)


def programs(port: int, secret: Path) -> list[HostileProgram]:
    """The suite.

    Args:
        port: a listening port on the loopback of this machine.
        secret: a file of this machine, and a place beside which nothing may appear.
    """
    spread = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True: time.sleep(1)\n    os._exit(0)\nprint('done')"
    )
    return [
        HostileProgram("fork bomb", spread, ("too_many_processes",)),
        HostileProgram("fork until refused", "import os\nwhile True: os.fork()", ("too_many_processes",)),
        HostileProgram(
            "thread bomb",
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
            ("too_many_processes",),
        ),
        HostileProgram("endless stdout", "while True: print('x' * 1000)", ("output_limit",)),
        HostileProgram("endless stderr", "import sys\nwhile True: sys.stderr.write('x' * 1000)", ("output_limit",)),
        HostileProgram("busy loop", "while True: pass", ("cpu_limit",)),
        HostileProgram(
            "busy loop that ignores signals",
            "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass",
            ("cpu_limit",),
        ),
        HostileProgram("sleep for ever", "import time\nwhile True: time.sleep(1)", ("timeout",)),
        HostileProgram(
            "sleep, ignoring SIGTERM",
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)",
            ("timeout",),
        ),
        HostileProgram("memory hog", "x = []\nwhile True: x.append(bytearray(1 << 20))", ("out_of_memory",)),
        HostileProgram(
            "memory hog in many processes",
            "import os, time\nfor _ in range(5): os.fork() if os.getpid() == 2 else None\n"
            "x = os.urandom(1 << 20) * 120\ntime.sleep(9)",
            ("out_of_memory",),
        ),
        HostileProgram(
            "page tables of 60,000 mappings",
            "import ctypes, time\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
            "for n in range(60000):\n    place = ctypes.c_void_p((1 << 44) + (n << 30))\n"
            "    ctypes.string_at(libc.mmap(place, ctypes.c_size_t(4096), 1, 0x100022, -1, 0), 1)\n"
            "time.sleep(9)",
            ("out_of_memory",),
        ),
        HostileProgram(
            "search for other programs",
            "import os, sys\nfound = []\nfor top, folders, names in os.walk('/'):\n"
            "    folders[:] = [name for name in folders if f'{top}{name}' not in ('/proc', '/dev')]\n"
            "    for path in (os.path.join(top, name) for name in names if '.so' not in name):\n"
            "        if os.access(path, os.X_OK) and open(path, 'rb').read(4) == b'\\x7fELF': found.append(path)\n"
            "found = {os.path.basename(path) for path in found} - {'prlimit', 'setpriv'}\n"
            f"print({SAFE!r} if found == {{os.path.basename(sys.executable)}} else found)",
            ("ok",), is_harmless=_printed_safe,
        ),
        HostileProgram("huge integer", "print(9 ** 9 ** 9)", ("cpu_limit", "out_of_memory")),
        HostileProgram("huge integer as text", "print(10 ** 5000)", ("exit_error",)),
        HostileProgram("huge string", "print(len('x' * 10 ** 12))", ("out_of_memory",)),
        HostileProgram("endless recursion", "def f(): return f()\nf()", ("exit_error",)),
        HostileProgram(
            "endless recursion without Python's limit",
            "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return [f(x)]\nf(1)",
            ("out_of_memory", "crashed", "cpu_limit"),
        ),
        HostileProgram(
            "endless recursion on the C stack",
            "import sys\nsys.setrecursionlimit(10 ** 9)\n"
            "class A:\n    def __repr__(self): return repr(self)\nrepr(A())",
            ("crashed", "out_of_memory"),
        ),
        HostileProgram("segmentation fault", "import ctypes\nctypes.string_at(0)", ("crashed",)),
        HostileProgram("abort", "import os\nos.abort()", ("crashed",)),
        HostileProgram("kill every process", "import os\nos.kill(-1, 9)", ("exit_error",)),
        HostileProgram(
            "kill the parent",
            "import os, time\nfor pid in (os.getppid(), 1):\n    for number in (9, 15, 19):\n"
            "        try: os.kill(pid, number)\n        except PermissionError: pass\n"
            f"time.sleep(0.2)\nprint({SAFE!r})",
            ("ok",), is_harmless=_printed_safe,
        ),
        HostileProgram(
            "stop itself and its parent",
            "import os, signal\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass\n"
            "os.kill(os.getpid(), signal.SIGSTOP)",
            ("timeout",),
        ),
        HostileProgram(
            "many zombies",
            "import os, time\nfor _ in range(200):\n    try:\n        if os.fork() == 0: os._exit(0)\n"
            "    except OSError: time.sleep(0.01)\ntime.sleep(9)",
            ("too_many_processes", "timeout"),
        ),
        HostileProgram("grandchild that outlives", orphan, ("ok",)),
        _trying(
            "read other files",
            "open('/etc/passwd')", "open('/etc/hostname')", "os.listdir('/home')", "os.listdir('/work')",
            f"open({str(secret)!r})", f"os.listdir({str(secret.parent)!r})",
            f"open({str(Path(__file__).resolve())!r})", f"os.listdir({str(Path(__file__).resolve().parents[2])!r})",
            "os.listdir('/root') and -1 if set(os.listdir('/root')) <= {'.pyenv'} else 0",
        ),
        HostileProgram(
            "read the environment",
            f"import os\nprint({SAFE!r} if not any('SECRET' in k for k in os.environ) else os.environ)\n",
            ("ok",), is_harmless=_printed_safe,
        ),
        _trying(
            "read other processes through /proc",
            "-1 if all(int(p) < 50 for p in os.listdir('/proc') if p.isdigit()) else 0",
            "open('/proc/1/environ').read()", "open('/proc/1/mem', 'rb')", "os.listdir('/proc/1/root/etc/apt')",
            "os.listdir('/proc/1/fd')",
            "open('/proc/self/task/../../1/mem', 'rb')",
            "open('/proc/kcore', 'rb').read(1)", "open('/proc/sysrq-trigger', 'w')",
            "open('/proc/sys/kernel/hostname', 'w')", "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')",
        ),
        _trying(
            "follow links out of the sandbox",
            "open('/tmp/a')", "open('/tmp/b/etc/passwd')", "open('/tmp/c')",
            before=(
                f"os.symlink({str(secret)!r}, '/tmp/a')\nos.symlink('/proc/1/root', '/tmp/b')\n"
                f"os.symlink('/proc/1/cwd/../..{secret}', '/tmp/c')"
            ),
        ),
        _trying(
            "write outside /tmp",
            *(f"open({place!r}, 'w')" for place in ("/x", "/usr/x", "/usr/lib/x", "/dev/x", PROGRAM, "/etc/x")),
            f"os.unlink({PROGRAM!r})", "os.mkdir('/home')", "os.truncate('/dev/fd/0', 9)",
            "open('/proc/self/fd/0', 'rb+', 0).write(b'x')", "os.write(0, b'x')", "os.ftruncate(0, 1 << 30)",
        ),
        HostileProgram("fill one file", "open('/tmp/x', 'wb').write(bytes(1 << 27))", ("exit_error",)),
        HostileProgram(
            "fill /tmp and /dev/shm",
            "i = 0\nwhile True:\n    for d in ('/tmp', '/dev/shm'):\n"
            "        open(f'{d}/{i}', 'wb').write(bytes(1 << 20))\n    i += 1",
            ("exit_error",),
        ),
        _trying(
            "memory that no limit counts",
            "os.memfd_create('x')", "libc.shmget(0, 1 << 30, 0o1666)", "libc.msgget(0, 0o1666)",
            "libc.syscall(447, 0)", "pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)",
            "pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)",
            before="import socket; pair = socket.socketpair()",
        ),
        HostileProgram(
            "many empty files",
            "import os\nn = 0\nwhile True:\n    os.mkdir(f'/tmp/{n}'); n += 1",
            ("out_of_memory", "cpu_limit", "timeout"),
        ),
        HostileProgram(
            "open many files",
            "x = [open('/dev/null') for _ in range(100000)]",
            ("exit_error",),
        ),
        _trying(
            "write what bubblewrap would say",
            *(f"os.write({number}, b'{{\"exit-code\": 0}}')" for number in range(3, 64)),
        ),
        _trying(
            "reach the network",
            f"socket.create_connection(('127.0.0.1', {port}), 1)", "socket.create_connection(('1.1.1.1', 53), 1)",
            "socket.getaddrinfo('example.com', 80)",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
            "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.create_server(('127.0.0.1', 0))", "socket.create_server(('::1', 0), family=socket.AF_INET6)",
            "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
            f"socket.socket(socket.AF_UNIX).connect('\\0verl-hostile-{port}')",
            before="import socket",
        ),
        _trying(
            "trace, mount, make namespaces",
            "libc.ptrace(16, 1, 0, 0)", "libc.ptrace(0, 0, 0, 0)", "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
            "libc.umount2(b'/tmp', 2)", "libc.unshare(0x10000000)", "libc.unshare(0x20000)", "libc.chroot(b'/tmp')",
            "libc.setns(os.open('/proc/self/ns/net', 0), 0)", "libc.pivot_root(b'/tmp', b'/tmp')",
            "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",
            "libc.syscall(435, ctypes.byref(ctypes.create_string_buffer(88)), 88)",
        ),
        _trying(
            "keyrings, io_uring, BPF, user faults",
            "libc.syscall(250, 0, -3, 1)", "libc.syscall(425, 8, ctypes.byref(ctypes.create_string_buffer(120)))",
            "libc.syscall(321, 0, 0, 0)", "libc.syscall(323, 0)", "libc.syscall(298, 0, 0, -1, -1, 0)",
        ),
        _trying(
            "become somebody else, raise limits",
            "os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chown('/tmp/x', 0, 0)", "os.nice(-5)",
            "os.execv('/usr/bin/sudo', ['sudo'])", "os.execv('/bin/sh', ['sh'])",
            "libc.prctl(38, 0, 0, 0, 0)", "libc.sethostname(b'x', 1)",
            *(f"limit('RLIMIT_{name}')" for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE")),
            before=(
                "import resource\nopen('/tmp/x', 'w')\ndef limit(name):\n"
                "    try: resource.setrlimit(getattr(resource, name), (1 << 40, 1 << 40))\n"
                "    except ValueError: return -1"
            ),
        ),
        _trying("take terminals", "os.openpty()", "open('/dev/ptmx')", "open('/dev/tty')", "open('/dev/console')"),
        HostileProgram(
            "type into the terminal",
            f"import fcntl, os, termios\ntry:\n    t = os.open('/dev/tty', os.O_RDWR)\n"
            f"    fcntl.ioctl(t, termios.TIOCSTI, b'x')\n    print('typed')\nexcept OSError: print({SAFE!r})",
            ("ok",), is_harmless=_printed_safe,
        ),
        HostileProgram("close stdout", "import os\nos.close(1)\nos.close(2)\nimport time\ntime.sleep(9)", ("timeout",)),
        HostileProgram("leave before the answer", "import os\nos._exit(0)\nprint(1)", ("ok",)),
        HostileProgram("bytes that are no text", "import os\nos.write(1, bytes(range(256)))", ("ok",)),
        HostileProgram("input that is not read", "print('done')", ("ok",), stdin="x" * (1 << 24)),
        HostileProgram("source that is no program", "def (", ("exit_error",)),
        HostileProgram("replace builtins", "import builtins\nbuiltins.print = None\nprint(1)", ("exit_error",)),
        HostileProgram("truncate its own source", "open(__file__, 'w')", ("exit_error",)),
    ]  # fmt: skip


@dataclass
class MachineState:
    """Parts of this machine that a program could harm, as they were before it ran."""

    port: int
    secret: Path
    connections: list[str]
    marker: str
    processes: set[int]

    def harm(self) -> list[str]:
        """Return what the program changed on this machine; an empty list is no harm."""
        found = [f"connection from {peer}" for peer in self.connections]
        found += [f"process {pid} is left" for pid in living_descendants() - self.processes]
        if self.secret.read_text() != self.marker or len(list(self.secret.parent.iterdir())) != 1:
            found.append("a file of this machine changed")
        return found


def living_descendants() -> set[int]:
    """Processes that this one started and that still run, orphans included while it is a subreaper."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in descendants(os.getpid())}
    return {
        pid for pid, path in states.items() if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"
    }


@contextmanager
def machine(folder: Path) -> Iterator[MachineState]:
    """A listening server, a secret file and a secret variable, to be left alone by every program."""
    secret = folder / "private" / "secret.txt"
    secret.parent.mkdir()
    marker = secrets.token_hex()
    secret.write_text(marker)
    os.environ["VERL_SECRET"] = marker
    with (
        adopting_orphans(),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = server.getsockname()[1]
        abstract.bind(f"\0verl-hostile-{port}")
        abstract.listen()
        state = MachineState(port, secret, [], marker, living_descendants())
        for listener in (server, abstract):
            threading.Thread(target=_accept, args=(listener, state.connections), daemon=True).start()
        try:
            yield state
        finally:
            del os.environ["VERL_SECRET"]


def _accept(server: socket.socket, connections: list[str]) -> None:
    while True:
        try:
            connection, peer = server.accept()
        except OSError:
            return
        connections.append(str(peer))
        connection.close()


def judge(sandbox: Sandbox, hostile: HostileProgram, state: MachineState) -> tuple[ProgramResult, list[str]]:
    """Run one program; return its outcome and the harm it did."""
    if hostile.statuses == ("timeout",):
        limits = SHORT
    else:
        limits = LIMITS if {"timeout", "too_many_processes"} & set(hostile.statuses) else PATIENT
    outcome = sandbox.run(hostile.program, hostile.stdin, limits)
    harm = state.harm()
    if not hostile.is_harmless(outcome):
        harm.append(f"it got through: {outcome.stdout.strip()[-200:]}")
    if state.marker in outcome.stdout + outcome.stderr:
        harm.append("it learned a secret")
    return outcome, harm
