"""What the C library does with freed memory, seen from the page faults of a process."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from verl.utils.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def a_pass():
    kept = [torch.ones(2**22) for _ in range(20)]  # 16 MiB each

a_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    a_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_what_a_pass_freed_the_next_uses_without_page_faults():
    def faults(how):
        return int(
            subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout
        )

    assert 10 * faults("keep") < faults("default")  # a pass is 20 · 4096 pages
