"""The private parts of torchdata's and PyTorch's data loaders are where they were, and mean what they meant."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.datasets import torchdata_private as private
from verl.datasets.sampler import InOrder

ROWS = list(range(12))


class Remembering(list):
    """A data set with a state of its own."""

    def state_dict(self):
        return {"rows": len(self)}

    def load_state_dict(self, state):
        assert state == {"rows": len(self)}


def after_two_batches(workers: int, rows=None):
    rows = ROWS if rows is None else rows
    loader = StatefulDataLoader(rows, batch_size=2, num_workers=workers, sampler=InOrder(rows))
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    del batches
    return state


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_state_says_who_read_the_rows(workers: int):
    state = after_two_batches(workers)
    assert private.reading_processes(state) == workers
    assert not private.has_dataset_state(state)
    assert private.has_dataset_state(after_two_batches(workers, Remembering(ROWS)))


@pytest.mark.parametrize(("saved", "wanted"), [(0, 2), (2, 0), (2, 1)])
def test_a_state_for_other_processes_has_every_field_that_their_own_has(saved: int, wanted: int):
    """A field that a version adds is missing from what is made here."""

    def fields(state, depth=3):
        skipped = ("_worker_snapshots", *private.SAMPLER)
        return {
            key: fields(value, depth - 1) if isinstance(value, dict) and depth and key not in skipped else None
            for key, value in state.items()
        }

    loader = StatefulDataLoader(ROWS, batch_size=2, num_workers=wanted, sampler=InOrder(ROWS))
    made = private.for_other_processes(after_two_batches(saved), loader)
    assert fields(made) == fields(after_two_batches(wanted))
    loader.load_state_dict(made)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_the_handler_that_a_loader_sets_is_known():
    """In a process of its own: PyTorch installs it once per process, with the first loader."""
    script = """
import signal
from torch.utils.data import DataLoader
from verl.datasets.torchdata_private import is_handler_of_torch
print(is_handler_of_torch(signal.getsignal(signal.SIGCHLD)))
next(iter(DataLoader(range(2), num_workers=1)))
print(is_handler_of_torch(signal.getsignal(signal.SIGCHLD)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False", "True"]
