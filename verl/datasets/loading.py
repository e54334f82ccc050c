"""Iterate over a data loader and replace its worker processes when they die."""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from verl.datasets.torchdata_private import (
    for_other_processes,
    has_dataset_state,
    is_handler_of_torch,
    reading_processes,
)
from verl.errors import CheckpointError
from verl.supervision.killable_pool.output import PrintedOutput

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Losses of processes in a row, without a batch in between, after which the loop still continues."""


def bound_to_driver() -> Callable[[int], None]:
    """Return a ``worker_init_fn`` that bounds what a worker prints and ends it when this process ends (on Linux).

    What all workers print goes to a file of limited size, and its beginning to standard error. PyTorch's own watchdog
    fails when the worker is blocked, for example on a full pipe, and when the worker is not a child of this process
    but of a fork server.
    """
    return partial(_bind, os.getpid(), _printed_to(os.getpid()))


@functools.cache
def _printed_to(driver: int) -> Connection:
    """The connection that all workers of this process, ``driver``, print to; a thread reads it."""
    output = PrintedOutput("the processes that read rows")

    def read() -> None:
        more = True
        while more:  # until all that could print to it has ended
            select.select([output.reader], [], [])
            more = output.read()
        os.close(output.reader)

    threading.Thread(target=read, name="printed by readers", daemon=True).start()
    return Connection(output.writer, readable=False)  # which processes can be given, however they are started


def _bind(driver: int, output: Connection, _: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(driver,), name="end with driver", daemon=True).start()


def _end_with(driver: int) -> None:
    try:
        select.select([os.pidfd_open(driver)], [], [])
    except ProcessLookupError:
        logger.debug("the driver ended before this process had begun")
    os.kill(os.getpid(), signal.SIGKILL)


def batches(loader: Any) -> Iterator[Any]:
    """Iterate once over a ``StatefulDataLoader``; replace lost worker processes and continue from the same place.

    Processes are lost when they are killed from outside, by the kernel when memory is short, or by a bus error when
    /dev/shm, which batches pass through, is full. After more than ``MAX_LOSSES`` losses in a row the loader's error is
    raised, with a note on remedies.
    """
    losses = 0
    while True:
        try:
            for batch in _iterator(loader):
                losses = 0
                yield batch
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not _is_loss(error, loader):
                raise
            losses += 1
            if losses > MAX_LOSSES:
                error.add_note(
                    "Processes that read rows were lost again and again. If /dev/shm is full (df /dev/shm) or memory "
                    "is short, free some; or let the driver read: num_workers=0 (with rollouts "
                    "dataloader_num_workers=0)."
                )
                raise
            logger.warning("a process that reads rows was lost, others continue from the same row: %s", error)
            # With its own state the loader starts new processes behind the last batch that it gave.
            loader.load_state_dict(loader.state_dict())
        else:
            return


def load_position(loader: Any, state: Mapping[str, object]) -> None:
    """Load a state into a ``StatefulDataLoader``, also one saved with another number of worker processes.

    Raises:
        CheckpointError: the numbers differ and the data set has its own state, which is separate in each process.
    """
    saved = reading_processes(state)
    if saved != loader.num_workers:
        if has_dataset_state(state):
            raise CheckpointError(
                f"the checkpoint was saved with {saved} processes that read rows, and there are "
                f"{loader.num_workers} now; the dataset has its own state_dict(), one per process, which cannot be "
                f"redistributed over another number of processes. Set num_workers={saved} "
                f"(dataloader_num_workers={saved} with rollouts; the machine needs as many CPUs), or set "
                "resume_mode=disable to start anew."
            )
        state = for_other_processes(state, loader)
    loader.load_state_dict(state)


def skip_batches(loader: Any, count: int) -> int:
    """Move a new ``StatefulDataLoader`` behind its first ``count`` batches by reading those of the last epoch.

    Returns:
        the number of complete epochs among them.
    """
    epochs, rest = divmod(count, len(loader))
    if hasattr(loader.sampler, "epoch"):
        loader.sampler.epoch = epochs
    rows = iter(loader)
    for _ in range(rest):
        next(rows)
    loader.load_state_dict(loader.state_dict())
    return epochs


def _is_loss(error: Exception, loader: Any) -> bool:
    """Return whether ``error`` means a lost process; PyTorch marks exceptions raised by the data set with "Caught "."""
    if loader.num_workers == 0 or str(error).startswith("Caught "):
        return False
    return not isinstance(error, RuntimeError) or "DataLoader worker (pid" in str(error)


def _iterator(loader: Any) -> Iterator[object]:
    """Create the iterator; a dead worker then raises an error only when a batch is requested."""
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    # PyTorch's handler raises as soon as a worker ends, in the middle of whatever the driver does then. It is
    # installed once per process, with the first loader, which may belong to other code.
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_handler_of_torch(before) else before)
