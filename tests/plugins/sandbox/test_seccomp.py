"""The system-call filter, instruction by instruction, for both architectures."""

import errno
import struct

import pytest

pyseccomp = pytest.importorskip("pyseccomp", exc_type=(ImportError, RuntimeError))

from verl.plugins.sandbox.seccomp import MACHINES, NEW_NAMESPACE, REFUSED, filter_program  # noqa: E402

ALLOWED, KILLED = "allowed", "killed"
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMES = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}


def number_of(machine: str, name: str) -> int:
    return pyseccomp.resolve_syscall(NAMES[machine], name)


def decide(machine: str, number: int, argument: int = 0, audit: int | None = None, third: int = 0) -> str:
    """What the kernel would do with a call: a slow interpreter of the filter (struct seccomp_data as input)."""
    data = struct.pack("<IIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, argument, 0, third, 0, 0, 0)
    program = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    place, accumulator = 0, 0
    while True:
        code, yes, no, value = program[place]
        place += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:  # and
            accumulator &= value
        elif code == 0x05:  # jump
            place += value
        elif code == 0x06:  # return
            if value == 0x7FFF0000:
                return ALLOWED
            return KILLED if value == 0x80000000 else errno.errorcode[value & 0xFFFF]
        else:
            holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}[code]
            place += yes if holds else no


def test_the_numbers_are_those_of_the_kernel():
    """Two of each table, from asm/unistd.h, and one that is the same everywhere."""
    assert [number_of("x86_64", name) for name in ("ptrace", "unshare", "clone3")] == [101, 272, 435]
    assert [number_of("aarch64", name) for name in ("ptrace", "unshare", "clone3")] == [117, 97, 435]


@pytest.mark.parametrize("machine", MACHINES)
def test_refused_calls_fail_and_all_others_pass(machine):
    refused = {number_of(machine, name) for name in REFUSED}
    assert len(refused) == len(REFUSED)
    assert min(refused) > 0
    special = {number_of(machine, name) for name in ("clone", "clone3", "socket")}
    for number in set(range(600)) - special:
        assert decide(machine, number) == ("EPERM" if number in refused else ALLOWED), number
    assert decide(machine, number_of(machine, "clone3")) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_makes_processes_and_threads_but_no_namespaces(machine):
    clone = number_of(machine, "clone")
    assert decide(machine, clone, 17) == ALLOWED  # SIGCHLD: fork
    assert decide(machine, clone, 0x3D0F00) == ALLOWED  # the flags of pthread_create
    for flag in NEW_NAMESPACE:
        assert decide(machine, clone, flag | 17) == "EPERM"
        assert decide(machine, clone, 1 << 32 | flag) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_are_local(machine):
    socket = number_of(machine, "socket")
    assert decide(machine, socket, 1) == ALLOWED
    for family in (0, 2, 3, 10, 16, 17, 38, 40, 1 << 32 | 2):  # inet, ax25, inet6, netlink, packet, alg, vsock
        assert decide(machine, socket, family) == "EAFNOSUPPORT"


@pytest.mark.parametrize("machine", MACHINES)
def test_buffers_of_sockets_stay_as_they_are(machine):
    """The kernel reads 32 bits of the option, whatever stands above them."""
    setsockopt = number_of(machine, "setsockopt")
    for option in range(40):
        wanted = "EPERM" if option in (7, 8, 32, 33) else ALLOWED
        assert decide(machine, setsockopt, 1, third=option) == wanted
        assert decide(machine, setsockopt, 1, third=1 << 32 | option) == wanted


def test_calls_of_another_table_kill():
    assert decide("x86_64", 0, audit=0x40000003) == KILLED  # i386 by int 0x80
    assert decide("x86_64", 0x40000000) == KILLED  # x32
    assert decide("aarch64", 0, audit=0x40000028) == KILLED  # 32-bit ARM
