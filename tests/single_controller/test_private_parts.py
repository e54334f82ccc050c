"""Ray's private parts are where :mod:`verl.single_controller.ray.private` looks for them.

Where one of these fails on another version of Ray, mend the function of that file which the message names.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import ray

from tests.support.waiting import eventually
from verl.single_controller.ray import private

MOVED = f"Ray {ray.__version__} has moved what verl/single_controller/ray/private.py takes: "


class Plain:
    """No Worker: Ray alone is looked at here."""

    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("no model")

    def about(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def end(self, number):
        os.kill(os.getpid(), number)


@pytest.fixture
def actor(ray_cluster):
    """Makes an actor of its own, which takes no core."""
    made = []

    def make(*args, **options):
        made.append(ray.remote(num_cpus=0)(Plain).options(**options).remote(*args))
        return made[-1]

    yield make
    for one in made:
        ray.kill(one)


def dead_row(one):
    def row():
        found = private.actor_row(one)
        return found.is_dead and found

    return eventually(row, f"{MOVED}actor_row, the state DEAD")


def test_logs_folder(ray_cluster):
    folder = private.logs_folder()
    assert (folder / "raylet.out").is_file(), f"{MOVED}logs_folder"
    assert (folder / "gcs_server.out").is_file(), f"{MOVED}logs_folder"


def test_is_own_head(ray_cluster):
    assert private.is_own_head() is True, f"{MOVED}is_own_head"
    raylet = private.own_raylet()
    assert raylet is not None, f"{MOVED}own_raylet"
    assert psutil.Process(raylet).name() == "raylet", f"{MOVED}own_raylet"


def test_silence_token_notice(caplog):
    from ray._private.authentication import authentication_token_setup

    private.silence_token_notice()
    with caplog.at_level("WARNING", logger="ray"):
        authentication_token_setup.logger.addHandler(caplog.handler)
        authentication_token_setup._warn_token_auth_enabled()
        authentication_token_setup._warn_token_auth_disabled()
        authentication_token_setup.logger.removeHandler(caplog.handler)
    said = {record.getMessage().partition(" for this Ray cluster")[0] for record in caplog.records}
    assert said == {"Token authentication is disabled"}, f"{MOVED}silence_token_notice"


def test_address_left_behind(tmp_path):
    assert not private.address_left_behind(str(tmp_path)), f"{MOVED}address_left_behind"
    (tmp_path / "ray_current_cluster").write_text("10.0.0.7:6379")
    assert private.address_left_behind(str(tmp_path)) == "10.0.0.7:6379", f"{MOVED}address_left_behind"


def test_the_row_of_a_living_actor(actor):
    one = actor(name="plain_0")
    assert ray.get(private.has_started(one)), f"{MOVED}has_started"
    pid, node_id = ray.get(one.about.remote())
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    row = private.actor_row(one)
    assert row == private.ActorRow(
        name="plain_0", pid=pid, node_id=node_id, address=address, is_dead=False, died_at_ms=0, how=""
    ), f"{MOVED}actor_row"
    assert private.TITLE in Path(f"/proc/{pid}/cmdline").read_text(), f"{MOVED}TITLE"
    assert list(private.logs_folder().glob(f"worker-*-{pid}.err")), f"{MOVED}the name of a worker's log"


def test_an_actor_that_was_ended_on_purpose(actor):
    one = actor()
    ray.get(one.about.remote())
    ray.kill(one)
    row = dead_row(one)
    assert private.is_end_on_purpose(row.how), f"{MOVED}is_end_on_purpose, it says {row.how!r}"
    assert row.died_at_ms > 1e12, f"{MOVED}actor_row, the time of the death"


def test_an_actor_that_was_killed(actor):
    one = actor()
    pid, _ = ray.get(one.about.remote())
    os.kill(pid, signal.SIGKILL)
    row = dead_row(one)
    assert private.is_silent_end(row.how), f"{MOVED}is_silent_end, it says {row.how!r}"
    assert not private.is_end_on_purpose(row.how)
    assert row.pid == pid, f"{MOVED}actor_row, the process of a dead actor"
    assert "potential root causes" not in row.how, f"{MOVED}brief"


def test_an_actor_that_wrote_about_the_signal_that_ended_it(actor):
    one = actor()
    pid, _ = ray.get(one.about.remote())
    one.end.remote(signal.SIGBUS)
    dead_row(one)
    (log,) = private.logs_folder().glob(f"worker-*-{pid}.err")
    found = eventually(lambda: private.signal_in_log(log.read_text()), f"{MOVED}signal_in_log")
    assert found == "SIGBUS", f"{MOVED}signal_in_log"


def test_an_actor_whose_constructor_raised(actor):
    one = actor(True)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(private.has_started(one))
    assert dead_row(one).how == private.CONSTRUCTOR_RAISED, f"{MOVED}actor_row, the cause of the death"


def test_the_class_and_the_options_behind_an_actor_class():
    assert private.unwrapped(Plain) == (Plain, {}), f"{MOVED}unwrapped"
    assert private.unwrapped(ray.remote(num_cpus=0.5)(Plain)) == (Plain, {"num_cpus": 0.5}), f"{MOVED}unwrapped"


@pytest.mark.skipif(sys.platform != "linux", reason="the file has another name")
def test_ray_knows_the_settings():
    raylets, devices = (
        {"free_objects_period_milliseconds", "prestart_worker_first_driver"},
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    )
    assert set(private.SETTINGS) == {*(f"RAY_{name}" for name in raylets), devices}
    folder = Path(ray.__file__).parent
    library = (folder / "_raylet.so").read_bytes()
    for name in raylets:
        assert name.encode() in library, f"{MOVED}SETTINGS, {name}"
    assert any(devices in path.read_text() for path in folder.rglob("accelerator*.py")), f"{MOVED}SETTINGS, {devices}"
