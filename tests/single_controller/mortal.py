"""Workers that meet in collectives of gloo, and that can be made to die, stop and hang there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from verl.errors import ProcessLostError
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.supervision.processes import show_life


class Mortal(Worker):
    """Ranks of one gloo group.

    Args:
        rank: this one does something else in its constructor, while the others wait for it.
        what: it does.
    """

    def __init__(self, rank: int | None = None, what: str = "die") -> None:
        super().__init__()
        if self.rank == rank:
            getattr(self, f"_{what}")()
        dist.init_process_group("gloo")
        self._register_dispatch_collect_info("train", self.rank, True)

    def pid(self):
        return os.getpid()

    def all_reduce(self, rank, what, started=None):
        """All ranks add up; ``rank`` does something else."""
        if self.rank != rank:
            if started:
                Path(started).touch()
            return self._sum()
        if started:
            wait_for_file(started)
            time.sleep(0.2)  # the other is in the collective by now, or will be at once
        return getattr(self, f"_{what}")()

    def _sum(self):
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    def _die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def _spin(self):
        while True:
            pass

    def _sleep(self):
        time.sleep(3600)

    def _work(self):
        """Longer than the limit, with a token now and then."""
        for _ in range(12):
            time.sleep(0.5)
            show_life()
        return self._sum()

    def _raise(self):
        raise ValueError("a row without a prompt")

    def _answer(self):
        return 0.0

    def _bus_error(self):
        os.kill(os.getpid(), signal.SIGBUS)

    def _break_connection(self):
        raise RuntimeError("Connection closed by peer")

    def _lose_a_helper(self):
        raise ProcessLostError("the engine's server died, and cannot be started again")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train(self, batch):
        return batch

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_later(self, batch, dying=None):
        if self.rank == dying:
            self._die()
        return batch


def wait_for_file(path):
    deadline = time.monotonic() + 30
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)
