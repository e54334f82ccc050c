"""End the driver when Ray does not answer on its node; calls of Ray would wait for ever.

A driver reads from its raylet (Ray's process on the node) over a local socket. While the raylet is stopped or hangs,
``ray.get``, ``ray.wait``, ``ray.put`` and ``ray.shutdown`` do not return, whatever their timeout. The same holds for
questions to the state server (GCS) of the cluster. No Python code can interrupt such a call, so the process ends, and
with it all processes that it started; :mod:`verl.supervision.restarts` then starts a new driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from verl.single_controller.ray.private import own_raylet
from verl.supervision.processes import end_program

logger = logging.getLogger(__name__)

EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h: a service that the program needs does not answer
START_TIMEOUT_S = 300.0  # for ray.init: it starts processes and reserves the memory of the object store
END_TIMEOUT_S = 60.0  # for ray.shutdown
SILENCE_S = 60.0  # for the state server to answer one question
FROZEN_S = 10.0  # for a raylet that was declared dead to notice it and end by itself
DEAD_S = 60.0  # for the run to start Ray again after its raylet has ended
_TICK_S = 1.0  # between two questions to Ray, and the unit in which its silence is counted
_CONSEQUENCE = (
    "Calls of Ray would wait for it without end, so this driver ends, with all processes that it started. The same "
    "command goes on from the newest checkpoint (resume_mode=auto)."
)


@contextmanager
def ending_if_late(call: str, timeout_s: float) -> Iterator[None]:
    """End this program if the block, which makes the named call of Ray, takes longer than ``timeout_s``."""
    problem = f"{call} did not return within {timeout_s:g} s: a process of Ray is stopped or hangs. {_CONSEQUENCE}"
    timer = threading.Timer(timeout_s, end_program, (problem, EXIT_CODE))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class NodeWatch:
    """Two threads: one asks the state server for the state of this node, the other judges the answers.

    Waiting times are counted in turns of the second thread, not read from a clock: a driver that was stopped itself
    has missed answers without a fault of Ray.
    """

    def __init__(self) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._stopped = threading.Event()
        self._is_dead = False
        self._silent_s = 0.0
        self._dead_s = 0.0
        self._asking = threading.Thread(target=self._ask, name="verl-ray-watch", daemon=True)
        self._judging = threading.Thread(target=self._judge, name="verl-ray-judge", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._asking.start()
        self._judging.start()

    def stop(self) -> None:
        """Stop to watch, before Ray is shut down."""
        self._stopped.set()
        self._asking.join(timeout=_TICK_S)  # a question after ray.shutdown would start another Ray

    def _ask(self) -> None:
        while not self._stopped.wait(_TICK_S) and ray.is_initialized():
            try:
                self._is_dead = any(node["NodeID"] == self._node_id and not node["Alive"] for node in ray.nodes())
            except RayError as error:
                logger.warning("Ray does not say which nodes live: %s", error)
                continue
            self._silent_s = 0.0
        self._stopped.set()

    def _judge(self) -> None:
        while not self._stopped.wait(_TICK_S):
            self._silent_s += _TICK_S
            self._dead_s = self._dead_s + _TICK_S if self._is_dead else 0.0
            problem = self._problem()
            if problem:
                end_program(f"{problem} {_CONSEQUENCE}", EXIT_CODE)

    def _problem(self) -> str:
        """Describe a fault of Ray on this node that lasts too long; empty if there is none."""
        if self._silent_s > SILENCE_S:
            return f"Ray's state server (gcs_server) has not answered for {SILENCE_S:g} s: it is stopped or hangs."
        raylet = own_raylet() if self._is_dead else None
        if raylet and self._dead_s > FROZEN_S:
            return f"Ray's process on this node (raylet, pid {raylet}) is stopped or hangs, and was declared dead."
        if self._dead_s > DEAD_S:
            return "Ray declared this node dead, and was not started again."
        return ""
