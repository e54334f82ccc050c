"""Batches from a data loader whose processes may be lost."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Losses without a batch between them, before the run is told."""


def ending_with_driver() -> Callable[[int], None]:
    """For ``worker_init_fn``: processes that read rows do not outlive this one, however it ends (on Linux).

    PyTorch's own watch ends them only where nothing else keeps them, as a full pipe does, and where this process is
    their parent, which it is not if they come from a fork server.
    """
    return partial(_end_with, os.getpid())


def _end_with(driver: int, _: int) -> None:
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_wait_and_end, args=(driver,), name="end with driver", daemon=True).start()


def _wait_and_end(driver: int) -> None:
    try:
        select.select([os.pidfd_open(driver)], [], [])
    except ProcessLookupError:
        logger.debug("the driver ended before this process had begun")
    os.kill(os.getpid(), signal.SIGKILL)


def batches(loader: Any) -> Iterator[Any]:
    """One pass over ``loader``, in its order; if a process that reads is lost, with new ones, from the same place.

    A process is lost when it is killed from outside, by the kernel when memory is short, or by a bus error when
    /dev/shm is full, through which batches come.

    Args:
        loader: a ``StatefulDataLoader``, at its beginning or where its state was loaded.

    Raises:
        Exception: of the loader, with a note on what to do, after ``MAX_LOSSES`` losses in a row.
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
                    "is short, free some; or let the driver read: data.dataloader_num_workers=0 (data.num_workers=0)."
                )
                raise
            logger.warning("a process that reads rows was lost, others go on from the same place: %s", error)
            loader.load_state_dict(loader.state_dict())
        else:
            return


def load_position(loader: Any, state: Mapping[str, Any]) -> None:
    """Let ``loader`` go on from ``state``, which a loader with another number of reading processes may have given.

    Where a pass stands is the state of the sampler and the number of batches that came. torchdata keeps both in one
    layout where the driver reads and in another where processes do, and takes neither for the other.

    Args:
        loader: a ``StatefulDataLoader`` over a data set with ``__getitem__``.
        state: its ``state_dict()`` in the middle of a pass.

    Raises:
        CheckpointError: the numbers differ, and the data set has a state of its own, which each process has for itself.
    """
    saved = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    if saved != loader.num_workers:
        state = _of_other_readers(state, saved, loader)
    loader.load_state_dict(state)


def _of_other_readers(state: Mapping[str, Any], saved: int, loader: Any) -> dict[str, Any]:
    wanted, position, batches_read, datasets = (
        loader.num_workers,
        state,
        state.get("_num_yielded"),
        [state.get("dataset_state")],
    )
    if saved:
        snapshot = state["_snapshot"]
        position, batches_read = snapshot["_main_snapshot"], snapshot["_snapshot_step"]
        datasets = [reader["dataset_state"] for reader in snapshot["_worker_snapshots"].values()]
    if any(dataset is not None for dataset in datasets):
        raise CheckpointError(
            f"the checkpoint was saved with {saved} processes that read rows, and there are {wanted} now; the data set "
            "has a state_dict() of its own, which every process holds for itself, so it cannot be dealt to another "
            f"number of them. Set data.dataloader_num_workers={saved} (data.num_workers={saved} without rollouts; the "
            "machine needs as many CPUs), or set trainer.resume_mode=disable to start anew."
        )
    names = ("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded")
    seed = position.get("_base_seed")  # of random numbers in the processes; the driver had none
    position = {name: position[name] for name in (*names, "_IterableDataset_len_called", "_shared_seed")}
    # A pass that is over ends again, at once: only so does the sampler begin its next epoch in either layout.
    if wanted == 0:
        return position | {
            "_num_yielded": batches_read,
            "fetcher_state": None,
            "dataset_state": None,
            "_iterator_finished": False,
        }
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    return {
        "_snapshot": {
            "_main_snapshot": position | {"_num_workers": wanted, "_base_seed": seed},
            "_worker_snapshots": {},
            "_snapshot_step": batches_read,
            "_last_yielded_worker_id": wanted - 1,
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    }


def _is_loss(error: Exception, loader: Any) -> bool:
    """Whether a process was lost; an error of the data set in such a process comes with a text that says so."""
    if loader.num_workers == 0 or str(error).startswith("Caught "):
        return False
    return not isinstance(error, RuntimeError) or "DataLoader worker (pid" in str(error)


def _iterator(loader: Any) -> Iterator[Any]:
    """Of one pass; a loss shows when a batch is asked for.

    PyTorch sets a handler that raises as soon as a process ends, in the middle of whatever the driver does then. It
    sets it once: with the first loader of this process, which may be somebody else's.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        is_of_torch = getattr(before, "__module__", "") == "torch.utils.data._utils.signal_handling"
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_of_torch else before)
