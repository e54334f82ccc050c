"""Which Ray a run joins: none that is gone."""

from __future__ import annotations

import gc
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
import ray

from tests.forks import run
from tests.workers.reward_manager.batches import TOKENIZER, batch_of
from verl.errors import ConfigError, ResourceError
from verl.single_controller.ray import session
from verl.single_controller.ray.session import init_arguments
from verl.trainer.ppo.reward import compute_reward_async
from verl.workers.reward_manager import NaiveRewardManager


@pytest.fixture(autouse=True)
def no_ray_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def nobody():
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def silent():
    """An address at which a process listens that does not answer, as one that is stopped."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def somebody():
    """An address at which a gRPC server answers."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_more_machines_than_a_ray_of_its_own_has_are_refused_before_ray_starts():
    had_started = ray.is_initialized()  # by other tests
    kwargs = SimpleNamespace(ray_init={"num_cpus": 8}, timeline_json_file=None)
    with pytest.raises(ResourceError, match=r"2 machines .*nnodes=2.*ray start --address.*or set nnodes=1"):
        session.ray_session(kwargs, nodes=2).__enter__()
    assert ray.is_initialized() is had_started


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_gone_is_an_error_at_once(monkeypatch, nobody, scheme):
    with pytest.raises(ResourceError, match=rf"no Ray answers at {scheme}{nobody} .*RAY_ADDRESS.*unset the address"):
        init_arguments({"address": scheme + nobody})
    monkeypatch.setenv("RAY_ADDRESS", scheme + nobody)
    with pytest.raises(ResourceError, match=f"no Ray answers at {scheme}{nobody}"):
        init_arguments({"num_cpus": 2})


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch, silent):
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(ResourceError, match=rf"no Ray answers at {silent} .*has ended, hangs, or cannot be reached"):
        init_arguments({"address": silent})


def test_a_cluster_that_answers_is_joined(monkeypatch, somebody):
    assert init_arguments({"address": somebody}) == {"address": somebody}
    monkeypatch.setenv("RAY_ADDRESS", somebody)
    assert init_arguments({"namespace": "x"}) == {"namespace": "x"}  # Ray reads RAY_ADDRESS itself
    assert init_arguments({"address": "local"}) == {"address": "local"}


def test_the_address_of_a_ray_that_is_gone_is_not_followed(tmp_path, nobody, somebody, caplog):
    (tmp_path / "ray_current_cluster").write_text(nobody)
    given = {"_temp_dir": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert init_arguments(given) == {**given, "address": "local"}
    assert f"a Ray at {nobody} left its address behind" in caplog.text
    (tmp_path / "ray_current_cluster").write_text(somebody)
    assert init_arguments(given) == {**given, "address": somebody}  # the checked one; Ray would read the file again
    (tmp_path / "ray_current_cluster").unlink()
    assert init_arguments(given) == given


def test_the_ray_of_another_account_is_not_followed(tmp_path, somebody, caplog):
    file, given = tmp_path / "ray_current_cluster", {"_temp_dir": str(tmp_path)}
    file.write_text(somebody)
    tmp_path.chmod(0o777)  # as Ray makes it
    assert init_arguments(given) == {**given, "address": somebody}
    file.chmod(0o666)
    assert init_arguments(given) == {**given, "address": "local"}
    assert "is another account's and is ignored" in caplog.text
    file.chmod(0o644)
    if os.getuid() == 0:
        os.chown(file, 1, -1)
        assert init_arguments(given) == {**given, "address": "local"}
        os.chown(file, 0, -1)
        os.chown(tmp_path, 1, -1)
        assert init_arguments(given) == {**given, "address": "local"}
    file.rename(tmp_path / "other")
    file.symlink_to(tmp_path / "other")
    assert init_arguments(given) == {**given, "address": "local"}


def test_a_size_starts_a_ray_of_its_own(tmp_path, somebody):
    (tmp_path / "ray_current_cluster").write_text(somebody)
    given = {"_temp_dir": str(tmp_path), "num_cpus": 2}
    assert init_arguments(given) == {**given, "address": "local"}


def test_rows_that_are_alive_are_not_looked_through_again_and_again():
    full, before = [], gc.get_threshold()

    def count(phase, info):
        full.extend([phase] * (phase == "start" and info["generation"] == 2))

    gc.callbacks.append(count)
    try:
        session.prepare_for_batches()
        rows = [[row] for row in range(400_000)]
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*before)
    assert len(rows) == 400_000
    assert len(full) < 2  # with Python's thresholds 4


def test_a_reward_manager_scores_in_a_process_of_ray(ray_cluster):
    import ray

    manager, data = NaiveRewardManager(TOKENIZER, 0), batch_of(["#### 3", "x"], ["3", "3"], "openai/gsm8k")
    scores, extra = ray.get(compute_reward_async.remote(data=data, reward_fn=manager), timeout=120)
    assert scores.sum(-1).tolist() == extra["score"] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="needs reward_fn, or config and tokenizer"):
        compute_reward_async.remote(data)


@pytest.mark.slow
def test_a_folder_that_ray_cannot_use_is_named(tmp_path):
    long = tmp_path / ("x" * 110)
    program = (
        "from types import SimpleNamespace; from verl.single_controller.ray.session import ray_session\n"
        "with ray_session(SimpleNamespace(ray_init={'num_cpus': 1}, timeline_json_file=None)): pass"
    )
    done = run(["-c", program], RAY_TMPDIR=str(long))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ResourceError: Ray does not start: OSError: " in last
    assert f"below {long}: set RAY_TMPDIR to a folder that can be written and has at most 40 characters." in last
