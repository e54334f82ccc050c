"""Copies of checkpoints in a store: on S3 (moto's server), and in fsspec's memory where a fault is made by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.checkpoint.test_run import SHARD, Run
from verl.errors import CheckpointError

SHARD = f"actor/{SHARD}"


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder in memory."""
    memory = fsspec.filesystem("memory")
    yield f"memory://{request.node.originalname}/run"
    memory.rm("/", recursive=True)


def run_of(root: Path, url: str, **plan: object) -> Run:
    return Run(root, remote=url, **plan)


def on_remote(url: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return sorted(name.removeprefix(path).lstrip("/") for name in system.find(path))


def test_each_step_is_copied_with_its_manifest_and_another_machine_goes_on(tmp_path, url):
    run = run_of(tmp_path / "a", url, keep={"actor": 1})
    run.save(1, 2)
    run.checkpoint.finish()
    assert [path.name for path in (tmp_path / "a").glob("global_step_*")] == ["global_step_2"]
    step = (SHARD, "data.pt", "driver_rng.pt", "manifest.json", "trainer_state.json")
    both = [f"global_step_{number}/{name}" for number in (1, 2) for name in step]
    assert on_remote(url) == sorted([*both, "latest_checkpointed_iteration.txt"])

    other = run_of(tmp_path / "b", url)
    assert other.resume() == 2
    other.save(3)
    other.checkpoint.finish()
    assert run_of(tmp_path / "a", url).resume() == 3  # newer than what is here, and of the same run
    assert Run(tmp_path / "c", resume_mode="resume_path", resume_from_path=f"{url}/global_step_1").resume() == 1
    assert run_of(tmp_path / "d", url, resume_mode="disable").resume() is None


def test_what_a_dying_upload_leaves_is_not_read(tmp_path, url):
    run = run_of(tmp_path / "a", url)
    run.save(1)
    run.checkpoint.finish()
    fsspec.filesystem("memory").pipe(f"/{url.partition('://')[2]}/global_step_2/{SHARD}", b"half")
    assert run_of(tmp_path / "b", url).resume() == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), f"global_step_2/{SHARD} is damaged: it has other bytes"),
        (lambda data: data[:-1], f"global_step_2/{SHARD} is damaged: it has .* bytes instead of"),
        (None, f"global_step_2/{SHARD} cannot be reached: FileNotFoundError"),
    ],
)
def test_a_damaged_copy_is_named_and_the_step_before_it_taken(tmp_path, url, caplog, damage, named):
    run = run_of(tmp_path / "a", url)
    run.save(1, 2)
    run.checkpoint.finish()
    memory, place = fsspec.filesystem("memory"), f"/{url.partition('://')[2]}/global_step_2/{SHARD}"
    memory.pipe(place, damage(memory.cat(place))) if damage else memory.rm(place)
    with pytest.raises(CheckpointError, match=f"{url}/{named}"):
        run_of(tmp_path / "b", url, on_damaged="stop").resume()
    with pytest.raises(CheckpointError, match=f"{url}/{named}"):
        Run(tmp_path / "c", resume_mode="resume_path", resume_from_path=f"{url}/global_step_2").resume()
    caplog.set_level(logging.WARNING)
    assert run_of(tmp_path / "d", url).resume() == 1
    assert f"{url}/global_step_2/{SHARD}" in caplog.text
    assert "Going on from step 1" in caplog.text
    memory.rm(f"/{url.partition('://')[2]}/global_step_1/manifest.json")
    with pytest.raises(CheckpointError, match=r"no newer step of .* is whole"):
        run_of(tmp_path / "e", url).resume()


def test_steps_of_another_run_do_not_take_the_place_of_local_ones(tmp_path, url, caplog):
    theirs, ours = run_of(tmp_path / "a", url), Run(tmp_path / "b")
    theirs.save(1, 2, 3)
    theirs.checkpoint.finish()
    ours.save(1)
    ours.checkpoint.finish()
    assert run_of(tmp_path / "b", url).resume() == 1
    assert "steps of another run" in caplog.text


class Server:
    """moto's server, which keeps its objects in this process: they outlive a stop."""

    def __init__(self) -> None:
        server = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
        self._make = server.ThreadedMotoServer
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = self._make(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of S3 with a bucket, and an environment that leads to it."""
    pytest.importorskip("s3fs", reason="pip install 'verl[s3]'")
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs
    from moto.moto_api._internal import moto_api_backend

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield server
    server.stop()
    moto_api_backend.reset()  # what was stored stays in this process, also for the next server
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_dies_in_the_middle_loses_nothing(tmp_path, s3, monkeypatch):
    from verl.checkpoint import remote

    url = "s3://bucket/run"
    run = run_of(tmp_path / "a", url)
    run.save(1)
    run.checkpoint.remote.wait()
    assert "global_step_1/manifest.json" in on_remote(url)

    put, sent = remote.RemoteSteps._put, []

    def dying(self: remote.RemoteSteps, source: Path, place: str, size: int) -> None:
        sent.append(place)
        if len(sent) == 3:
            s3.stop()
        put(self, source, place, size)

    monkeypatch.setattr(remote.RemoteSteps, "_put", dying)
    run.save(2)
    run.checkpoint.remote.wait()
    assert run.checkpoint.metrics() == {"recovery/failed_uploads": 1.0}
    with pytest.raises(CheckpointError, match=r"copy of step 2 is not complete.*whole in .*global_step_2"):
        run.checkpoint.finish()
    assert Run(tmp_path / "a").resume() == 2  # the local step is whole
    s3.start()
    assert "global_step_2/manifest.json" not in on_remote(url)
    assert run_of(tmp_path / "b", url).resume() == 1

    monkeypatch.setattr(remote.RemoteSteps, "_put", put)
    run.save(3)
    run.checkpoint.finish()
    assert run_of(tmp_path / "c", url).resume() == 3
