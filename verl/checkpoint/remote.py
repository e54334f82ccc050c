"""Copies of a run's steps in a remote folder (``trainer.default_hdfs_dir``), and the way back.

::

    {url}/latest_checkpointed_iteration.txt     "N", written last of all: the step to resume from
    {url}/global_step_N/manifest.json           written last of the step: size and checksum of each of its files
    {url}/global_step_N/actor/ ...              as in the local folder

A step is complete locally before its copy begins, in a thread beside training. Whatever happens to the server in
between, the local step stays, and what lies there without a manifest is never read. Remote steps are not removed.
"""

from __future__ import annotations

import logging
import posixpath
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from verl.base.remote import file_system, reaching
from verl.checkpoint.files import NewFolder, replace_text, sync_tree
from verl.checkpoint.steps import (
    LATEST,
    MANIFEST,
    contains_step,
    read_latest,
    read_lineage,
    read_manifest,
    saved_steps,
    step_folder,
)
from verl.errors import CheckpointError, VerlError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""Attempts to send or fetch a file before its step counts as failed."""


class RemoteSteps:
    """The copies of the steps below a local folder.

    Args:
        url: the remote folder.
        root: the local one, with ``global_step_N`` folders.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url = url.rstrip("/")
        self.root = root
        self.failed_uploads = 0
        self._thread: threading.Thread | None = None
        self._problem: CheckpointError | None = None
        self._owed: int | None = None

    # ---- sending ------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start to send a local step, in a thread; waits for the one before, whose files may be removed afterwards."""
        self.wait()
        self._owed = step
        self._thread = threading.Thread(target=self._send_owed, name="upload of a checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until what :meth:`begin` started has ended, well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def problem(self) -> CheckpointError | None:
        """Return the failure since the last call, if any; :meth:`finish` tries again unless a later step was sent."""
        problem, self._problem = self._problem, None
        return problem

    def finish(self) -> None:
        """Wait, and send once more what could not be sent.

        Raises:
            CheckpointError: it could not be sent again.
        """
        self.wait()
        if self._owed is not None:
            self.problem()
            self.begin(self._owed)
            self.wait()
        if problem := self.problem():
            raise problem

    def _send_owed(self) -> None:
        assert self._owed is not None
        step, folder = self._owed, step_folder(self.root, self._owed)
        try:
            self.send(folder)
        except VerlError as error:
            self.failed_uploads += 1
            self._problem = CheckpointError(
                f"the copy of step {step} is not complete: {error} The step is whole in {folder}; `verl.utils.fs` and "
                "the tools of the store can copy it."
            )
            self._problem.__cause__ = error
            return
        self._owed = None
        logger.info("copied step %d to %s", step, self.url)

    def send(self, folder: Path) -> None:
        """Copy a step's folder, its manifest last, and name it as the latest.

        Raises:
            CheckpointError: a file could not be copied.
        """
        files = read_manifest(folder)
        target = f"{self.url}/{folder.name}"
        self._remove(f"{target}/{MANIFEST}")  # of an earlier save of the step: until this copy is whole, there is none
        for name, entry in files.items():
            self._put(folder / name, f"{target}/{name}", entry.size)
        self._put(folder / MANIFEST, f"{target}/{MANIFEST}", (folder / MANIFEST).stat().st_size)
        step = folder.name.rpartition("_")[2]
        system, path = file_system(f"{self.url}/{LATEST}")
        self._tried(f"{self.url}/{LATEST}", lambda: system.pipe_file(path, step.encode()))

    def _put(self, source: Path, url: str, size: int) -> None:
        system, path = file_system(url)

        def copy() -> None:
            system.makedirs(posixpath.dirname(path), exist_ok=True)
            system.put_file(str(source), path)
            system.invalidate_cache()
            if (there := system.size(path)) != size:
                raise CheckpointError(f"{url} has {there} bytes instead of {size}.")

        self._tried(url, copy)

    def _remove(self, url: str) -> None:
        system, path = file_system(url)

        def remove() -> None:
            system.invalidate_cache()
            if system.exists(path):
                system.rm_file(path)

        self._tried(url, remove)

    def _tried(self, url: str, act: Callable[[], T]) -> T:
        """Do it, up to :data:`ATTEMPTS` times."""
        for attempt in Retrying(
            retry=retry_if_exception(lambda error: not isinstance(error.__cause__, FileNotFoundError | ImportError)),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.2, max=10),
            reraise=True,
        ):
            with attempt, reaching(url, CheckpointError):
                return act()
        raise AssertionError("tenacity raises the last error")

    # ---- fetching -----------------------------------------------------------------------------

    def fetch_newest(self, on_damaged: str) -> None:
        """Make the newest remote step a local one, if it is newer than the local ones and of the same run.

        Args:
            on_damaged: ``previous`` takes the newest whole step before a damaged one, ``stop`` raises.

        Raises:
            CheckpointError: the store cannot be reached, or no step of it is whole and there is no local one.
        """
        latest = self._latest()
        if latest is None:
            return
        local = saved_steps(self.root)
        newest_here = (read_latest(self.root) if (self.root / LATEST).exists() else None) or max(local, default=None)
        if newest_here is not None and latest <= newest_here:
            return
        problems: list[str] = []
        for step in sorted((step for step in self._steps() if step <= latest), reverse=True):
            if newest_here is not None and step <= newest_here:
                break
            if step != latest and not problems:
                problems.append(f"{self.url}/global_step_{latest}, which {LATEST} names, does not exist")
            if problems and on_damaged == "stop":
                break
            try:
                self.fetch(step, self.root, newest_here)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if problems:
                logger.warning("damaged copies: %s Going on from step %d.", " ".join(problems), step)
            return
        message = f"no newer step of {self.url} is whole: {' '.join(problems) or 'there is none.'}"
        if newest_here is None or on_damaged == "stop":
            raise CheckpointError(
                f"{message} Restore it, name a step with resume_mode=resume_path and resume_from_path, or set "
                "resume_mode=disable to start anew."
            )
        logger.warning("%s Going on from the local step %d.", message, newest_here)

    def fetch(self, step: int, into: Path, newest_here: int | None = None) -> Path:
        """Copy a remote step to ``into`` and verify each byte of it; return its folder.

        Raises:
            CheckpointError: it is damaged, which the message says with the remote file, or of another run than the
                local step ``newest_here``.
        """
        source = f"{self.url}/global_step_{step}"
        folder = NewFolder(step_folder(into, step))
        partial = folder.begin()
        try:
            self._get(f"{source}/{MANIFEST}", partial / MANIFEST)
            try:
                files = read_manifest(partial)
            except CheckpointError as error:
                raise CheckpointError(f"{source}/{MANIFEST} is damaged: {error}.") from error
            self._require_same_run(partial, newest_here)
            for name in files:
                self._get(f"{source}/{name}", partial / name)
            synced = sync_tree(partial)
            for name, entry in files.items():
                if (copied := synced[name]) != entry:
                    what = (
                        f"{copied.size} bytes instead of {entry.size}" if copied.size != entry.size else "other bytes"
                    )
                    raise CheckpointError(f"{source}/{name} is damaged: it has {what}.")
            folder.commit()
        except CheckpointError:
            folder.discard()
            raise
        replace_text(into / LATEST, str(step))
        logger.info("copied %s to %s", source, folder.path)
        return folder.path

    def _require_same_run(self, fetched: Path, newest_here: int | None) -> None:
        """The steps of another run must not go on from here, nor be hidden by newer ones."""
        if newest_here is None:
            return
        local_lineage, remote_lineage = (
            read_lineage(step_folder(self.root, newest_here), MANIFEST),
            read_lineage(fetched, MANIFEST),
        )
        if local_lineage and remote_lineage and not contains_step(remote_lineage, newest_here, local_lineage[-1][0]):
            raise CheckpointError(
                f"{self.url} has steps of another run than {self.root}, where step {newest_here} is the last."
            )

    def _get(self, url: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        system, path = file_system(url)
        self._tried(url, lambda: system.get_file(path, str(target)))

    def _latest(self) -> int | None:
        url = f"{self.url}/{LATEST}"
        system, path = file_system(url)

        def read() -> bytes | None:
            system.invalidate_cache()
            return system.cat_file(path) if system.exists(path) else None

        text = self._tried(url, read)
        if text is None:
            return None
        if not text.strip().isdigit():
            raise CheckpointError(f"{url} names no step; it holds {text[:40]!r}.")
        return int(text)

    def _steps(self) -> list[int]:
        system, path = file_system(self.url)
        names = self._tried(
            self.url, lambda: [posixpath.basename(name.rstrip("/")) for name in system.ls(path, detail=False)]
        )
        steps = (name.removeprefix("global_step_") for name in names if name.startswith("global_step_"))
        return [int(step) for step in steps if step.isdigit()]
