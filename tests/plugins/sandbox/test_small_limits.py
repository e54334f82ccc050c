"""Limits so small that they are reached before the program has begun, or by what is not the program's."""

import os

import psutil
import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from verl.plugins.sandbox import Limits, Sandbox


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


@needs_sandbox
def test_a_run_whose_time_is_up_while_it_starts_leaves_nothing(sandbox):
    """The time ends from before bubblewrap has said who process 1 is to after the program has begun."""
    sandbox.run("print(1)")
    descriptors = len(os.listdir("/proc/self/fd"))
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    outcomes = [sandbox.run("import time\ntime.sleep(60)", limits=Limits(wall_s=0.001 + 0.002 * n)) for n in range(25)]
    assert {outcome.status for outcome in outcomes} == {"timeout"}
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children  # zombies are children


@needs_sandbox
def test_what_bubblewrap_says_does_not_count_as_output(sandbox):
    """It writes some hundred bytes about its processes beside the program's three."""
    outcome = sandbox.run("print(42)", limits=Limits(max_output_bytes=3))
    assert (outcome.status, outcome.stdout, outcome.exit_code) == ("ok", "42\n", 0)
