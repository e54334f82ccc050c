"""Which Ray a run joins: none that is gone."""

from __future__ import annotations

import logging
import socket

import pytest

from verl.errors import ResourceError
from verl.single_controller.ray.address import with_address


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
def somebody():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_gone_is_an_error_at_once(monkeypatch, nobody, scheme):
    with pytest.raises(ResourceError, match=rf"no Ray answers at {scheme}{nobody} .*RAY_ADDRESS.*unset the address"):
        with_address({"address": scheme + nobody})
    monkeypatch.setenv("RAY_ADDRESS", scheme + nobody)
    with pytest.raises(ResourceError, match=f"no Ray answers at {scheme}{nobody}"):
        with_address({"num_cpus": 2})


def test_a_cluster_that_answers_is_joined(monkeypatch, somebody):
    assert with_address({"address": somebody}) == {"address": somebody}
    monkeypatch.setenv("RAY_ADDRESS", somebody)
    assert with_address({"namespace": "x"}) == {"namespace": "x"}  # Ray reads RAY_ADDRESS itself
    assert with_address({"address": "local"}) == {"address": "local"}


def test_the_address_of_a_ray_that_is_gone_is_not_followed(tmp_path, nobody, somebody, caplog):
    (tmp_path / "ray_current_cluster").write_text(nobody)
    given = {"_temp_dir": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert with_address(given) == {**given, "address": "local"}
    assert f"a Ray at {nobody} left its address behind" in caplog.text
    (tmp_path / "ray_current_cluster").write_text(somebody)
    assert with_address(given) == given
    (tmp_path / "ray_current_cluster").unlink()
    assert with_address(given) == given


def test_a_size_starts_a_ray_of_its_own(tmp_path, somebody):
    (tmp_path / "ray_current_cluster").write_text(somebody)
    given = {"_temp_dir": str(tmp_path), "num_cpus": 2}
    assert with_address(given) == {**given, "address": "local"}
