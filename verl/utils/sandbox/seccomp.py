"""The system calls that a sandboxed program may not make, as a program for the kernel's filter (seccomp-BPF).

Namespaces and limits are the walls; the filter closes what they leave open: memory that no limit
counts (``memfd``, System V segments, buffers of TCP), new namespaces (a capability inside one reaches
more of the kernel), sockets that no namespace isolates (vsock reaches the host of a virtual machine),
tracing, kernel keyrings, io_uring, BPF. Layout: ``struct sock_filter`` of
https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, THIRD_ARGUMENT = 0, 4, 16, 32
"""Offsets in ``struct seccomp_data``."""
NEW_NAMESPACE = 0x7E020000
"""The CLONE_NEW* flags of clone(2)."""
AF_UNIX = 1
"""The one address family that a program may use, to speak to its own processes."""
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants: what waits in a socket is memory of the kernel."""
X32 = 0x40000000
"""Numbers of x86-64's second table of calls start here."""

EVERYWHERE = {
    "clone3": 435, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "io_uring_enter": 426,
    "io_uring_register": 427, "io_uring_setup": 425, "memfd_secret": 447, "mount_setattr": 442, "move_mount": 429,
    "open_tree": 428, "pidfd_getfd": 438,
}  # fmt: skip
"""Calls that came after all architectures agreed on numbers."""


@dataclass(frozen=True)
class Architecture:
    """Numbers of system calls (``asm/unistd.h``) and the AUDIT_ARCH value of a machine."""

    audit: int
    clone: int
    socket: int
    setsockopt: int
    refused: dict[str, int]
    has_x32: bool = False


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E, clone=56, socket=41, setsockopt=54, has_x32=True,
        refused={
            "acct": 163, "add_key": 248, "bpf": 321, "chroot": 161, "delete_module": 176, "fanotify_init": 300,
            "finit_module": 313, "init_module": 175, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246,
            "keyctl": 250, "memfd_create": 319, "mount": 165, "msgget": 68, "name_to_handle_at": 303,
            "open_by_handle_at": 304, "perf_event_open": 298, "pivot_root": 155, "process_vm_readv": 310,
            "process_vm_writev": 311, "ptrace": 101, "quotactl": 179, "reboot": 169, "request_key": 249,
            "semget": 64, "setns": 308, "settimeofday": 164, "shmget": 29, "swapon": 167, "syslog": 103,
            "umount2": 166, "unshare": 272, "userfaultfd": 323, "vhangup": 153,
        },
    ),
    "aarch64": Architecture(
        audit=0xC00000B7, clone=220, socket=198, setsockopt=208,
        refused={
            "acct": 89, "add_key": 217, "bpf": 280, "chroot": 51, "delete_module": 106, "fanotify_init": 262,
            "finit_module": 273, "init_module": 105, "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104,
            "keyctl": 219, "memfd_create": 279, "mount": 40, "msgget": 186, "name_to_handle_at": 264,
            "open_by_handle_at": 265, "perf_event_open": 241, "pivot_root": 41, "process_vm_readv": 270,
            "process_vm_writev": 271, "ptrace": 117, "quotactl": 60, "reboot": 142, "request_key": 218,
            "semget": 190, "setns": 268, "settimeofday": 170, "shmget": 194, "swapon": 224, "syslog": 116,
            "umount2": 39, "unshare": 97, "userfaultfd": 282, "vhangup": 58,
        },
    ),
}  # fmt: skip


def filter_program(machine: str) -> bytes:
    """The filter of an architecture, as the kernel reads it.

    A refused call fails with EPERM; clone3, whose flags a filter cannot see, with ENOSYS, upon which C
    libraries use clone; socket with EAFNOSUPPORT; setsockopt for larger buffers with EPERM. Calls of a
    foreign table kill the program.

    Args:
        machine: a key of :data:`ARCHITECTURES`, as ``platform.machine()`` gives it.
    """
    arch = ARCHITECTURES[machine]
    calls = {**EVERYWHERE, **arch.refused}
    code = [_load(ARCHITECTURE), _jump(JUMP_EQUAL, arch.audit, yes=1, no=0), _return(KILL_PROCESS), _load(NUMBER)]
    if arch.has_x32:
        code += [_jump(JUMP_AT_LEAST, X32, yes=0, no=1), _return(KILL_PROCESS)]
    for name, number in sorted(calls.items()):
        reason = errno.ENOSYS if name == "clone3" else errno.EPERM
        code += [_jump(JUMP_EQUAL, number, yes=0, no=1), _return(ERRNO | reason)]
    code += [
        _jump(JUMP_EQUAL, arch.clone, yes=0, no=4),
        _load(FIRST_ARGUMENT),
        _jump(JUMP_ANY_BIT, NEW_NAMESPACE, yes=0, no=1),
        _return(ERRNO | errno.EPERM),
        _return(ALLOW),
        _jump(JUMP_EQUAL, arch.socket, yes=0, no=3),
        _load(FIRST_ARGUMENT),
        _jump(JUMP_EQUAL, AF_UNIX, yes=1, no=0),
        _return(ERRNO | errno.EAFNOSUPPORT),
        _jump(JUMP_EQUAL, arch.setsockopt, yes=0, no=2 * len(BUFFER_SIZES) + 1),
        _load(THIRD_ARGUMENT),
    ]
    for option in BUFFER_SIZES:
        code += [_jump(JUMP_EQUAL, option, yes=0, no=1), _return(ERRNO | errno.EPERM)]
    code += [_return(ALLOW)]
    return b"".join(code)


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", LOAD, 0, 0, offset)


def _jump(kind: int, value: int, *, yes: int, no: int) -> bytes:
    """Skip ``yes`` instructions if the comparison holds, else ``no``."""
    return struct.pack("<HBBI", kind, yes, no, value)


def _return(value: int) -> bytes:
    return struct.pack("<HBBI", RETURN, 0, 0, value)
