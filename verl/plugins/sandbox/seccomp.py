"""System-call filter (seccomp) of sandboxed programs, compiled by libseccomp.

It refuses what namespaces and limits do not cover: memory that no limit counts (``memfd``, System V
segments, socket buffers), new namespaces (a capability inside one reaches more of the kernel), sockets that
no namespace isolates (vsock reaches the host of a virtual machine), tracing, kernel keyrings, io_uring, BPF.
"""

from __future__ import annotations

import errno
import functools
import tempfile

MACHINES = ("x86_64", "aarch64")
"""Supported ``platform.machine()``: their system calls have the argument positions that the rules below use."""

REFUSED = (
    "acct", "add_key", "bpf", "chroot", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "kcmp",
    "kexec_file_load", "kexec_load", "keyctl", "memfd_create", "memfd_secret", "mount", "mount_setattr", "move_mount",
    "msgget", "name_to_handle_at", "open_by_handle_at", "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_vm_readv", "process_vm_writev", "ptrace", "quotactl", "reboot", "request_key", "semget", "setns",
    "settimeofday", "shmget", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip
"""System calls that fail with EPERM."""
NEW_NAMESPACE = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""The CLONE_NEW* flags of clone(2)."""
AF_UNIX = 1
"""The only address family allowed, for communication between the program's own processes."""
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants: no limit counts the kernel memory of socket buffers."""
INT = 0xFFFFFFFF
"""Mask for int arguments: the kernel reads only the lower 32 bits of the register."""


@functools.cache
def filter_program(machine: str) -> bytes:
    """Return the BPF program for one of :data:`MACHINES`.

    Refused calls fail with EPERM, ``socket`` with EAFNOSUPPORT, ``clone3`` with ENOSYS. System calls of
    another architecture (32-bit, x32) kill the program.

    Raises:
        RuntimeError: libseccomp is not installed.
        ValueError: libseccomp is too old for one of the calls.
    """
    import pyseccomp  # here, for it loads libseccomp, which only machines that run programs need

    arch = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[machine]
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    if arch != pyseccomp.system_arch():
        rules.add_arch(arch)
        rules.remove_arch(pyseccomp.Arch.NATIVE)
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    for name in (*REFUSED, "clone3"):
        if pyseccomp.resolve_syscall(arch, name) == -1:
            raise ValueError(f"libseccomp is too old: it does not know {name}; 2.5.2 or newer is needed")
        # A filter cannot read clone3's flags, which are behind a pointer. On ENOSYS, C libraries use clone instead.
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS if name == "clone3" else errno.EPERM), name)
    for flag in NEW_NAMESPACE:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    rules.add_rule(pyseccomp.ERRNO(errno.EAFNOSUPPORT), "socket", pyseccomp.Arg(0, pyseccomp.NE, AF_UNIX))
    for option in BUFFER_SIZES:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "setsockopt", pyseccomp.Arg(2, pyseccomp.MASKED_EQ, INT, option))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
