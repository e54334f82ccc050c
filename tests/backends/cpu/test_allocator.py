"""What the C library does with freed memory, seen from how much of it stays with the process."""

import subprocess
import sys

import pytest

from verl.backends.cpu import allocator

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")

FREED = """
import mmap, os, runpy, sys
keep = runpy.run_path(sys.argv[1])["keep_freed_memory"]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

def freed(how, mib):
    said = None if how == "default" else keep(all_sizes=how == "keep all")
    before = resident()
    blocks = [b"x" * (mib << 20) for _ in range(192 // mib)]
    held = resident() - before
    del blocks
    print(said, held, resident() - before, flush=True)

for case in sys.argv[2:]:  # in a process each, as nothing takes the settings of the C library back
    how, mib = case.split(":")
    if (child := os.fork()) == 0:
        freed(how, int(mib))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(*cases, **environment):
    """What ``keep_freed_memory`` said, and the share of 192 MiB that stays when they are freed.

    A case is what to keep and the MiB of a block.
    """
    done = subprocess.run(
        [sys.executable, "-c", FREED, allocator.__file__, *cases],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    found = []
    for line in done.stdout.splitlines():
        said, held, left = line.split()
        assert int(held) > 180 * 2**20
        found.append((said, int(left) / int(held)))
    assert len(found) == len(cases)
    return found


def test_what_is_freed_stays_and_blocks_above_the_bound_go_back_unless_all_are_kept():
    found = run("default:24", "keep:24", "keep:64", "keep all:64")
    assert [said for said, _ in found] == ["None", "True", "True", "True"]
    assert [left > 0.9 for _, left in found] == [False, True, False, True]
    assert all(left > 0.9 or left < 0.5 for _, left in found)


@pytest.mark.parametrize(
    "environment",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
        pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, marks=pytest.mark.slow),
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_what_the_user_sets_stays(environment):
    [(said, left)] = run("keep:24", **environment)
    assert said == "False"
    assert left < 0.5


def test_tunables_of_other_parts_of_the_library_do_not_count():
    [(said, _)] = run("keep:24", GLIBC_TUNABLES="glibc.rtld.optional_static_tls=1024")
    assert said == "True"


RELEASED = """
import re, runpy, sys, torch
buffers = runpy.run_path(sys.argv[1])["ReclaimableBuffers"]()

def lazily_free():
    return sum(int(kib) for kib in re.findall(r"LazyFree: +(\\d+) kB", open("/proc/self/smaps").read()))

first = buffers.take((16, 1 << 20), torch.float32).fill_(1.0)
address = first.data_ptr()
del first
buffers.release()
released = lazily_free()
again = buffers.take((8, 1 << 20), torch.float32)
same = again.data_ptr() == address
known = set(again.unique().tolist()) <= {0.0, 1.0}
again.fill_(2.0)
larger = buffers.take((4, 1 << 20), torch.float32)
print(released, same, known, lazily_free(), set(larger.unique().tolist()), float(again.min()))
"""


def test_released_buffers_are_the_systems_until_they_are_used_again():
    """64 MiB are released, of which the next buffer takes the first 32 MiB back; a second buffer is new, and zeros."""
    done = subprocess.run(
        [sys.executable, "-c", RELEASED, allocator.__file__], capture_output=True, text=True, check=True
    )
    released, same, known, left, zeros, kept = done.stdout.split()
    assert 60 * 1024 < int(released) <= 64 * 1024
    assert (same, known, zeros, kept) == ("True", "True", "{0.0}", "2.0")
    assert 28 * 1024 < int(left) <= 32 * 1024
