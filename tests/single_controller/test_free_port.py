"""The port at which ranks meet."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import pytest

from verl.single_controller.base import worker
from verl.single_controller.base.worker import free_port


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which ports they give away")
def test_it_is_none_that_the_system_gives_to_a_connection():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    before = random.getstate()
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert max(ports) < first_given
    assert random.getstate() == before  # a run draws from it


def test_one_that_is_listened_on_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(worker, "_FIRST_PORT", port)
        monkeypatch.setattr(worker, "_first_given_port", lambda: port + 2)
        assert {free_port() for _ in range(20)} <= {port + 1}


def test_without_ports_below_the_systems_own_it_asks_the_system(monkeypatch):
    monkeypatch.setattr(worker, "_first_given_port", lambda: 1024)
    with socket.socket() as probe:
        probe.bind(("", free_port()))
