"""Processes of a data loader that are killed, or die because ``/dev/shm`` is full.

Another process goes on: every row is read once, in the same order. After 3 failures without a batch the run stops.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from tests.support.waiting import eventually
from verl.datasets import loading
from verl.datasets.loading import MAX_LOSSES, batches, bound_to_driver, load_position
from verl.datasets.sampler import InOrder, SeededShuffle
from verl.errors import CheckpointError
from verl.supervision.killable_pool import output


class Numbers(Dataset):
    def __init__(self, broken: int | None = None, deadly: int | None = None, printed: int = 0) -> None:
        self.broken, self.deadly, self.printed = broken, deadly, printed

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> int:
        if item == self.broken:
            raise ConnectionError("row 7 is broken: its server is gone")
        if item == self.deadly:
            os.kill(os.getpid(), signal.SIGBUS)  # what a write to a full /dev/shm is answered with
        if self.printed:
            print(f"row {item} " + "x" * self.printed)
            os.write(2, b"from a library\n")
        return item


def loader(workers: int = 2, **rows: int) -> StatefulDataLoader:
    data = Numbers(**rows)
    order = InOrder(data) if rows else SeededShuffle(data, seed=3)
    return StatefulDataLoader(data, batch_size=2, num_workers=workers, sampler=order)


@pytest.fixture(autouse=True)
def deaths_are_seen_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver looks after its readers when no batch has come for 5 s; torchdata has that as a default."""
    monkeypatch.setattr(_StatefulMultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def readers() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.parametrize("at", [0, 1, 5, 18])
def test_every_row_comes_once_and_in_the_same_order(at):
    expected = [batch.tolist() for batch in loader(workers=0)]
    found = []
    before = {process.pid for process in readers()}
    for number, batch in enumerate(batches(loader())):
        found.append(batch.tolist())
        if number == at:
            victim = next(process for process in readers() if process.pid not in before)
            victim.kill()
    assert found == expected


@pytest.fixture
def handler_of_another_loader():
    """PyTorch's, which it sets with the first loader of a process."""
    before = signal.getsignal(signal.SIGCHLD)
    signal_handling._SIGCHLD_handler_set = False
    next(iter(DataLoader(Numbers(), num_workers=1)))
    assert signal.getsignal(signal.SIGCHLD) is not before
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_loss_is_no_error_in_the_middle_of_other_work(handler_of_another_loader):
    before = {process.pid for process in readers()}
    found = []
    for number, batch in enumerate(batches(loader())):
        found += batch.tolist()
        if number == 0:
            victim = next(process for process in readers() if process.pid not in before)
            victim.kill()
            # the signal of its end is on its way
            eventually(lambda: victim.status() == psutil.STATUS_ZOMBIE, "the end of a reader")  # noqa: B023
    assert sorted(found) == list(range(40))


def test_a_state_that_was_loaded_is_gone_on_from():
    expected = [batch.tolist() for batch in loader(workers=0)]
    first, second = loader(), loader()
    rows = batches(first)
    seen = [next(rows).tolist() for _ in range(6)]
    second.load_state_dict(first.state_dict())
    before = {process.pid for process in readers()}
    for number, batch in enumerate(batches(second)):
        seen.append(batch.tolist())
        if number == 3:
            next(process for process in readers() if process.pid not in before).kill()
    assert seen == expected
    rows.close()


# Each change of the number, and each place in an epoch: begun, in the middle, at its end, behind it.
@pytest.mark.parametrize("before, after, at", [(0, 2, 3), (2, 0, 20), (2, 1, 21), (1, 2, 0), (2, 1, 3)])
def test_another_number_of_readers_goes_on_at_the_same_row(before, after, at):
    """Three passes of twenty batches; each epoch has an order of its own."""
    undisturbed = loader(workers=0)
    expected = [batch.tolist() for _ in range(3) for batch in batches(undisturbed)]
    assert len(expected) == 60
    first, second = loader(before), loader(after)
    rows = (batch for _ in range(3) for batch in batches(first))
    seen = [next(rows).tolist() for _ in range(at)]
    state = first.state_dict()
    rows.close()
    load_position(second, state)
    while len(seen) < 60:  # after the 20th row the first pass has an empty rest
        seen += [batch.tolist() for batch in batches(second)]
    assert seen == expected


class Counting(Numbers):
    """Keeps a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"read": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"read": 7}


@pytest.mark.parametrize("before, after", [(0, 2), (2, 0), (1, 2)])
def test_a_data_set_with_a_state_of_its_own_wants_the_same_number_of_readers(before, after):
    first, second, same = (StatefulDataLoader(Counting(), batch_size=2, num_workers=n) for n in (before, after, before))
    next(iter(first))
    with pytest.raises(CheckpointError, match=rf"saved with {before} .* are {after} now.*num_workers={before} "):
        load_position(second, first.state_dict())
    load_position(same, first.state_dict())
    assert next(iter(same)).tolist() == [2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_is_raised_as_it_is(workers, caplog):
    with pytest.raises(ConnectionError, match="row 7 is broken"):
        list(batches(loader(workers, broken=7)))
    assert "was lost" not in caplog.text


@pytest.mark.slow
def test_processes_that_always_die_end_the_run_with_advice(caplog):
    with pytest.raises(RuntimeError, match="DataLoader worker") as error:
        list(batches(loader(deadly=7)))
    assert "df /dev/shm" in error.value.__notes__[0]
    assert caplog.text.count("was lost") >= MAX_LOSSES  # more, where batches came between


ORPHANS = """
import sys, time
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.datasets.loading import batches, bound_to_driver

class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, row):
        return "x" * 100_000  # the pipe to the driver is full at once

if __name__ == "__main__":  # a fork server imports this file for the class alone
    ends = bound_to_driver()
    loader = StatefulDataLoader(
        Rows(), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[1], worker_init_fn=ends
    )
    rows = batches(loader)
    next(rows)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_readers_do_not_outlive_a_driver_that_is_killed(how, tmp_path):
    program = tmp_path / "driver.py"
    program.write_text(ORPHANS)
    driver = subprocess.Popen([sys.executable, str(program), how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "ready\n"
    below = psutil.Process(driver.pid).children(recursive=True)
    assert len(below) >= 2
    driver.kill()
    driver.wait()
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == []


def test_what_a_data_set_prints_in_its_readers_is_bounded(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    before = threading.enumerate()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loading, "_printed_to", functools.cache(loading._printed_to.__wrapped__))
    data = Numbers(printed=500_000)  # 20 MB in all
    rows = StatefulDataLoader(data, batch_size=2, num_workers=2, worker_init_fn=bound_to_driver())
    with caplog.at_level(logging.WARNING):
        assert [row for batch in rows for row in batch.tolist()] == list(range(40))
        (file,) = tmp_path.glob("verl_printed_*.txt")
        most = output.FILE_BYTES + len(output._CUT)
        eventually(lambda: file.stat().st_size == most, "the end of what is kept")
    text = file.read_text()
    assert "from a library\n" in text
    assert text.startswith(("row 0 xxx", "row 2 xxx", "from a library"))
    shown = capfd.readouterr()
    assert len(shown.out + shown.err) <= output.EXCERPT_BYTES
    assert caplog.messages == [
        f"the processes that read rows print more than 2000 bytes: the rest is in {file}, up to 8 MB."
    ]
    [reader] = [thread for thread in set(threading.enumerate()) - set(before) if thread.name == "printed by readers"]
    del rows
    monkeypatch.undo()
    eventually(lambda: not reader.is_alive(), "the end of the thread, as nothing prints any more")
