"""The proof that the walls of a sandbox stand: a program that tries to do what is forbidden."""

from __future__ import annotations

import json

from verl.utils.sandbox.types import Limits, Outcome

PROBE_LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_mb=256, max_processes=4)

PROBE = """
import ctypes, errno, json, os

found = {"names": sorted(os.listdir("/")), "environment": sorted(os.environ), "pid": os.getpid()}
found["uid"] = os.getuid()
found["capabilities"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")]
found["privileges"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")]
found["links"] = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
found["writable"] = [p for p in ("/", "/usr/lib", "/dev", "/sandbox") if not os.statvfs(p).f_flag & os.ST_RDONLY]
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


def complaint(outcome: Outcome) -> str | None:
    """Which wall does not hold, by what the probe reports; None if all do."""
    if not outcome.ok:
        return f"the probe did not finish: {outcome.reason}"
    found = json.loads(outcome.stdout)
    checks = {
        "a process limit does not hold (Linux 5.14 or newer counts processes per user namespace)": (
            found["children"] != PROBE_LIMITS.max_processes - 1
        ),
        "the program runs as root": found["uid"] == 0,
        "the program has capabilities": any(int(mask, 16) for mask in found["capabilities"][:3]),
        "the program could gain privileges": found["privileges"] != ["1"],
        "the program sees a network besides its own loopback": found["links"] not in ([], ["lo"]),
        f"the program could write to {found['writable']}": bool(found["writable"]),
        "a memory limit does not hold": found["memory"] != "limited",
        "the program could make a namespace": found["unshare"] == 0,
        "the program shares the pid namespace": found["pid"] > 100,
    }
    broken = [what for what, is_broken in checks.items() if is_broken]
    return f"{'; '.join(broken)} (probe: {outcome.stdout.strip()})" if broken else None
