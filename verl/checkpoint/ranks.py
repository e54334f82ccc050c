"""Write each rank's part of a checkpoint, and combine the ranks' results."""

from __future__ import annotations

import logging
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from verl.base.repeats import without_repeated_traceback
from verl.checkpoint.files import FileEntry, NewFolder, sync_tree, write_states
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankState:
    """The training state of one rank at one moment."""

    states: dict[str, dict[str, object]]
    """CPU tensors, numbers and strings, by the file name on disk."""
    describe: Callable[[Path], None] | None = None
    """Writes further files into a folder: of an exported model, and on rank 0 config and tokenizer."""
    together: Callable[[Path], None] | None = None
    """Writes files of an exported model into a folder that it creates. Collective: raises on all ranks or on none."""

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write and sync this rank's files into a folder; return them by relative path.

        The folder is created if needed. Collective if there is :attr:`together`.
        """
        # In a folder of its own, so that sync_tree sees no files of other ranks.
        rank_folder = None if self.describe is self.together is None else folder / f".rank_{dist.get_rank()}"
        if rank_folder is not None:  # of a killed save, on a node whose file system rank 0 does not share
            shutil.rmtree(rank_folder, ignore_errors=True)
        if rank_folder is not None and self.together is not None:
            self.together(rank_folder)  # before anything that could fail on this rank alone
        folder.mkdir(parents=True, exist_ok=True)
        files = write_states(folder, self.states)
        if rank_folder is None:
            return files
        rank_folder.mkdir(exist_ok=True)
        if self.describe is not None:
            self.describe(rank_folder)
        described = sync_tree(rank_folder)
        for name in described:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)  # another rank may have made it
            (rank_folder / name).replace(folder / name)
        shutil.rmtree(rank_folder)
        return files | described


# ---- ranks that write one folder together ---------------------------------------------------------


def save_together(folder: Path, write: Callable[[Path], object]) -> None:
    """Write one folder from all ranks; it appears complete or not at all. Collective.

    Works with a shared file system and with one file system per node. An existing folder stays until the new one is
    complete. ``write`` writes this rank's files into the folder that it is given; if it fails on one rank, all raise
    ``CheckpointError``.
    """
    new = NewFolder(folder)
    task = f"write the checkpoint {new.path}"
    with on_all_ranks(task):
        if dist.get_rank() == 0:
            new.begin()
    with on_all_ranks(task):
        new.partial.mkdir(parents=True, exist_ok=True)  # on a node that does not share rank 0's file system
    with on_all_ranks(task):
        write(new.partial)
    with on_all_ranks(task):
        if dist.get_rank() == 0:
            new.commit()
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    with on_all_ranks(task):
        if hosts.index(socket.gethostname()) == dist.get_rank() and new.partial.exists():  # not shared, see above
            new.commit()


@contextmanager
def on_all_ranks(task: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on one, raise ``CheckpointError`` on all, so that none waits forever.

    The block must not contain collective operations, unless they raise on all ranks or on none.
    """
    try:
        yield
    finally:
        problem = sys.exc_info()[1]
        if problem is None or isinstance(problem, Exception):  # no collective after an interrupt
            texts: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(texts, None if problem is None else str(problem) or type(problem).__name__)
            for rank, text in enumerate(texts):
                if text is not None:
                    raise CheckpointError(f"cannot {task}: {text} (rank {rank})") from problem


# ---- parts of a save that the driver starts -------------------------------------------------------


@dataclass(frozen=True)
class SaveReport:
    """Result of one rank's part of a save."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    """Written files, by path below the folder."""
    problem: str | None = None
    """Why writing failed; None if it did not."""


class Writing:
    """One rank's part of a save in progress, written in a thread if ``background``.

    ``write`` writes into ``folder``, which it creates if needed, and returns the files' entries.
    """

    def __init__(self, write: Callable[[Path], dict[str, FileEntry]], folder: Path, background: bool) -> None:
        self._report: SaveReport | None = None
        # A daemon thread: when the process ends, a save in progress is useless, as it could not be committed.
        self._thread = threading.Thread(target=self._run, args=(write, folder), name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run(write, folder)

    def _run(self, write: Callable[[Path], dict[str, FileEntry]], folder: Path) -> None:
        try:
            self._report = SaveReport(write(folder))
        except Exception as error:  # noqa: BLE001 - in a thread; whatever it is, all ranks learn of it by report()
            is_disk = isinstance(error, OSError)  # such as a full one: where this code noticed it helps nobody
            reason = f" {error}" if is_disk else f"\n{''.join(traceback.format_exception(error)).rstrip()}"
            logger.warning("%s", without_repeated_traceback(f"could not write to {folder}:{reason}"))
            self._report = SaveReport(problem=f"{type(error).__name__}: {error}")

    def report(self, wait: bool) -> SaveReport | None:
        """The result; None while writing is in progress, unless ``wait``."""
        if wait and self._report is None:
            self._thread.join()
        return self._report
