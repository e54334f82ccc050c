"""Nodes that die, disks that are full: a real cluster of several nodes on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def seen_by(*arguments):
    run = subprocess.run(
        [sys.executable, "-m", "tests.single_controller.lose_a_node", *arguments],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen():
    return seen_by()


pytestmark = pytest.mark.slow


def test_ranks_of_other_nodes_are_asked_for_their_stacks(seen):
    kind, said = seen["hang"]
    assert kind == "ProcessLostError"
    rank = seen["rank"]
    assert re.match(
        rf"rank {rank} of 2 hangs in Mortal.all_reduce \(.*pid {seen['pids'][rank]} .*: not in the coll", said
    )
    assert "in _spin (" in said
    assert "in all_reduce (" in said


def test_a_node_that_dies_is_named_and_what_it_sent_stays(seen):
    kind, said = seen["node"]
    assert kind == "ProcessLostError"
    assert re.match(
        rf"rank {seen['rank']} of 2 died in Mortal.all_reduce \(.*\): The actor died because its node has", said
    )
    assert seen["received"] == 3 * 2**19


def test_a_pool_that_lost_a_node_says_so_and_a_new_one_waits_for_another_node(seen):
    kind, said = seen["same pool"]
    assert kind == "ProcessLostError"
    assert "places on nodes that died" in said
    assert "release() the pool" in said
    assert seen["sum"] == [2.0, 2.0]


def test_a_node_that_nobody_replaces_is_missed(seen):
    kind, said = seen["no node"]
    assert kind == "ResourceError"
    assert "asked for 2 ranks with one CPU each" in said
    assert "the cluster has 1 CPUs" in said
    assert said.count("health check failed") == 2
    assert said.endswith("No machine came in its place within trainer.recovery.replacement_timeout_s=4 s.")


def test_a_full_object_store_is_no_hang_and_says_what_to_do(seen):
    kind, said = seen["store"]
    assert kind == "WorkerError"
    assert "object store is full" in said
    assert "object_store_memory" in said
    assert seen["after"] == [1.0, 2.0]


def test_a_ray_of_the_run_itself_that_died_is_started_anew():
    seen = seen_by("own")
    assert seen["ray"][0] == "ProcessLostError"
    assert seen["sum"] == [2.0, 2.0]
    assert seen["arrived"] == [True, False], "what the old Ray held is not there any more"
