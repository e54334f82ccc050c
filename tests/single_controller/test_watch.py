"""A process of Ray that is stopped ends the driver, whose calls of Ray would wait for ever; real processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.waiting import eventually, is_alive

PROGRAM = """
import os, signal, sys
for name, value in {"period_ms": 300, "failure_threshold": 2, "timeout_ms": 500, "initial_delay_ms": 300}.items():
    os.environ[f"RAY_health_check_{name}"] = str(value)
import numpy as np
import psutil
import ray
from types import SimpleNamespace
from verl.single_controller.ray import watch
from verl.single_controller.ray.session import ray_session

watch.SILENCE_S = watch.FROZEN_S = 2
which, body = sys.argv[1:]
options = {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False}
with ray_session(SimpleNamespace(ray_init=options, timeline_json_file=None)):
    reference = ray.put(np.ones(1_000_000))
    family = psutil.Process().children(recursive=True)
    print(*(process.pid for process in family), flush=True)
    next(process for process in family if process.name() == which).send_signal(signal.SIGSTOP)
    exec(body)
print("went on", flush=True)
"""

ASK_AGAIN = """
while True:  # which question never returns depends on the moment
    try:
        ray.get(reference, timeout=1)
    except ray.exceptions.RayError:
        pass
"""


@pytest.mark.parametrize(
    ("which", "body", "said"),
    [
        ("raylet", ASK_AGAIN, "raylet, pid .* is stopped or hangs, and was declared dead"),
        pytest.param(
            "gcs_server",
            "ray.util.list_named_actors()",
            "gcs_server. has not answered for 2 s: it is stopped or hangs",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raylet",
            "from verl.single_controller.ray import session; session.END_TIMEOUT_S = 2",  # and ray.shutdown follows
            "ray.shutdown did not return within 2 s",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raylet", "state server", "in ray.shutdown"],
)
def test_a_stopped_process_of_ray_ends_the_driver_and_all_that_it_started(which, body, said):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, which, body], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()  # Ray may print what its processes say among ours
    pids = [int(pid) for pid in next(line for line in lines if line.replace(" ", "").isdigit()).split()]
    assert done.returncode == 69, done.stderr
    assert "went on" not in done.stdout
    eventually(lambda: not any(map(is_alive, pids)), "the processes of Ray ended")
    assert re.search(said, done.stderr)
    assert "The same command goes on from the newest checkpoint" in done.stderr
