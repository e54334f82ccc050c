"""The system-call filter, instruction by instruction, for both architectures."""

import errno
import re
import struct
from pathlib import Path

import pytest

from verl.utils.sandbox.seccomp import ARCHITECTURES, EVERYWHERE, filter_program

ALLOWED, KILLED = "allowed", "killed"


def decide(machine: str, number: int, argument: int = 0, audit: int | None = None, third: int = 0) -> str:
    """What the kernel would do with a call: a slow interpreter of the filter (struct seccomp_data as input)."""
    arch = ARCHITECTURES[machine].audit if audit is None else audit
    data = struct.pack("<IIQ6Q", number, arch, 0, argument, 0, third, 0, 0, 0)
    program = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    place, accumulator = 0, 0
    while True:
        code, yes, no, value = program[place]
        place += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:  # return
            if value == 0x7FFF0000:
                return ALLOWED
            return KILLED if value == 0x80000000 else errno.errorcode[value & 0xFFFF]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_refused_calls_fail_and_all_others_pass(machine):
    arch = ARCHITECTURES[machine]
    refused = set(arch.refused.values()) | set(EVERYWHERE.values()) - {EVERYWHERE["clone3"]}
    special = {arch.clone, arch.socket, EVERYWHERE["clone3"]}
    for number in set(range(600)) - special:
        assert decide(machine, number) == ("EPERM" if number in refused else ALLOWED), number
    assert decide(machine, EVERYWHERE["clone3"]) == "ENOSYS"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_clone_makes_processes_and_threads_but_no_namespaces(machine):
    clone = ARCHITECTURES[machine].clone
    assert decide(machine, clone, 17) == ALLOWED  # SIGCHLD: fork
    assert decide(machine, clone, 0x3D0F00) == ALLOWED  # the flags of pthread_create
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flag | 17) == "EPERM"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_sockets_are_local(machine):
    socket = ARCHITECTURES[machine].socket
    assert decide(machine, socket, 1) == ALLOWED
    for family in (0, 2, 3, 10, 16, 17, 38, 40):  # inet, ax25, inet6, netlink, packet, alg, vsock
        assert decide(machine, socket, family) == "EAFNOSUPPORT"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_buffers_of_sockets_stay_as_they_are(machine):
    setsockopt = ARCHITECTURES[machine].setsockopt
    for option in range(40):
        assert decide(machine, setsockopt, 1, third=option) == ("EPERM" if option in (7, 8, 32, 33) else ALLOWED)


def test_calls_of_another_table_kill():
    assert decide("x86_64", 0, audit=0x40000003) == KILLED  # i386 by int 0x80
    assert decide("x86_64", 0x40000000) == KILLED  # x32
    assert decide("aarch64", 0, audit=0x40000028) == KILLED  # 32-bit ARM


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),  # the table that 64-bit ARM uses
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_the_kernel_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not there (Debian: linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in found}
    arch = ARCHITECTURES[machine]
    ours = {**EVERYWHERE, **arch.refused, "clone": arch.clone, "socket": arch.socket}
    assert {name: number for name, number in ours.items() if numbers.get(name, number) != number} == {}
    assert len(numbers.keys() & ours.keys()) >= len(ours) - 2
