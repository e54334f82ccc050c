"""The folders of a run's checkpoints: one for each saved step, which is there whole or not at all.

::

    {root}/
      latest_checkpointed_iteration.txt     "N": where to go on
      global_step_N/
        manifest.json                       size and sum of every file of the step
        ...
      global_step_N.partial/                being written, or left by a run that broke off; never read
      global_step_N.replaced/               the step as it was saved before, while the new one takes its place

A step is written into its ``.partial`` folder. When every file is on the disk it gets its manifest, then its
name, then it becomes the latest. A crash before the rename leaves the step before; a crash after it, both.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from verl.errors import CheckpointError
from verl.utils.checkpoint.files import (
    REPLACED,
    FileEntry,
    entry_of,
    put_back,
    replace_folder,
    replace_text,
    sync_folder,
    write_bytes,
)
from verl.utils.fs import below

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
PARTIAL = ".partial"

Way = Sequence[tuple[str, int]]
"""The parts of a run that led to a step: the random id of each process, with the last step that is of it, in order."""
UNKNOWN = ""
"""Id of whoever saved a step that says nothing of its way."""


def step_folder(root: Path, step: int) -> Path:
    """Where ``step`` is saved."""
    return root / f"global_step_{step}"


def saved_steps(root: Path) -> dict[int, Path]:
    """The ``global_step_N`` folders under ``root``, by N, the first step first."""
    return {step: path for step, path in _folders(root, "") if path.is_dir()}


def read_latest(root: Path) -> int | None:
    """The step that ``latest_checkpointed_iteration.txt`` names; None if there is no such file.

    Raises:
        CheckpointError: it names none.
    """
    path = root / LATEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
        raise CheckpointError(f"{path} names no step; it holds {text[:40]!r}")
    return int(text)


# ---- writing ------------------------------------------------------------------------------------


def begin(root: Path, step: int) -> Path:
    """An empty folder to write ``step`` into; what saves that broke off have left is removed."""
    repair(root)
    for _, path in _folders(root, PARTIAL):
        shutil.rmtree(path)
    partial = _beside(root, step, PARTIAL)
    partial.mkdir(parents=True)
    return partial


def commit(root: Path, step: int, files: Mapping[str, FileEntry], way: Way = ()) -> Path:
    """Make what was written into the folder of :func:`begin` the checkpoint of ``step``, and the latest.

    Args:
        root: folder of the run's checkpoints.
        step: which step it is.
        files: every file by its path below the step's folder; each is synced.
        way: how the run came to this step.

    Raises:
        CheckpointError: a file is not there as it was written.
    """
    partial, final = _beside(root, step, PARTIAL), step_folder(root, step)
    for name, entry in files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CheckpointError(
                f"{path} was written by a rank and is not seen whole from here. The checkpoint folder must lie on a "
                "file system that all nodes share"
            )
    described = {
        "global_step": step,
        "way": way,
        "files": {name: asdict(entry) for name, entry in sorted(files.items())},
    }
    write_bytes(partial / MANIFEST, json.dumps({"format": 1, **described}, indent=1).encode())
    for folder in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        sync_folder(folder)
    replace_folder(partial, final)
    replace_text(root / LATEST, str(step))
    return final


def discard(root: Path, step: int) -> None:
    """Remove what was written of ``step`` and not committed; what cannot be removed goes at the next save."""
    shutil.rmtree(_beside(root, step, PARTIAL), ignore_errors=True)


def repair(root: Path) -> None:
    """Finish what a crash left between two renames: a step that was being saved again has its name again."""
    for step, _ in _folders(root, REPLACED):
        put_back(step_folder(root, step))


# ---- reading ------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Every file of a saved step.

    Raises:
        CheckpointError: there is no manifest, none that can be read, or one that names files elsewhere.
    """
    path = folder / MANIFEST
    try:
        files = json.loads(path.read_bytes())["files"]
        for name in files:
            below(folder, name)
        return {str(name): FileEntry(int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def read_way(folder: Path, fallback: str) -> Way | None:
    """How the run came to a saved step; None if that cannot be read.

    Args:
        folder: of the step.
        fallback: a file beside the manifest that says it too.
    """
    for name in (MANIFEST, fallback):
        try:
            described = json.loads((folder / name).read_bytes())
            way = described.get("way") or [[UNKNOWN, described["global_step"]]]
            return [(str(run), int(last)) for run, last in way]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError):
            logger.debug("%s does not say which run it is of", folder / name)
    return None


def is_on(way: Way, step: int, run: str) -> bool:
    """Whether ``step`` as ``run`` saved it lies on ``way``; another process may have saved the same number."""
    return any(run == part and step <= last for part, last in way)


def wrong_sizes(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """What is missing or has another size than the manifest says; cheap."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != entry.size:
            problems.append(f"{path} has {size} bytes instead of {entry.size}")
    return problems


def wrong_contents(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """What does not hold what was written; reads every byte."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        try:
            if entry_of(path) != entry:
                problems.append(f"{path} does not hold what was written: its checksum is wrong")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error}")
    return problems


def _folders(root: Path, suffix: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"global_step_(\d+){re.escape(suffix)}")
    found = [(int(m.group(1)), path) for path in root.glob("global_step_*") if (m := pattern.fullmatch(path.name))]
    return sorted(found)


def _beside(root: Path, step: int, suffix: str) -> Path:
    folder = step_folder(root, step)
    return folder.with_name(folder.name + suffix)
