"""The folders of a run's checkpoints: one per saved step, each complete or absent.

::

    {root}/
      latest_checkpointed_iteration.txt     "N": the step to resume from
      global_step_N/
        manifest.json                       size and checksum of every file of the step
        ...
      global_step_N.partial/                being written, or left by an interrupted run; never read
      global_step_N.replaced/               the earlier save of the step, while the new one takes its place

A step is written into its ``.partial`` folder. When every file is synced, the manifest is written, the folder renamed,
and the step recorded as the latest. After a crash before the rename the previous step is intact; after the rename,
both are.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from verl.base.fs import below
from verl.checkpoint.files import (
    PARTIAL,
    REPLACED,
    FileEntry,
    NewFolder,
    entry_of,
    put_back,
    replace_text,
    write_bytes,
)
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"

Lineage = Sequence[tuple[str, int]]
"""The processes that led to a step, in order: the random id of each and the last step that it made."""
LINEAGE = "way"
"""Key in JSON files; named differently from the type to keep old and new checkpoints readable by each other."""
UNKNOWN = ""
"""Id of the run that saved a step without a lineage."""


def step_folder(root: Path, step: int) -> Path:
    """Path of the folder of ``step``."""
    return root / f"global_step_{step}"


def saved_steps(root: Path) -> dict[int, Path]:
    """The ``global_step_N`` folders under ``root``, by N in ascending order."""
    return {step: path for step, path in _folders(root, "") if path.is_dir()}


def read_latest(root: Path) -> int | None:
    """Read the step number from ``latest_checkpointed_iteration.txt``; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read or holds no step number.
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
    """Create an empty folder to write ``step`` into; leftovers of interrupted saves are removed."""
    repair(root)
    for _, path in _folders(root, PARTIAL):
        shutil.rmtree(path)
    return NewFolder(step_folder(root, step)).begin()


def commit(root: Path, step: int, files: Mapping[str, FileEntry], lineage: Lineage = ()) -> Path:
    """Turn the folder of :func:`begin` into the checkpoint of ``step``, and the latest.

    ``files`` are all files, already synced, by path below the step's folder.

    Raises:
        CheckpointError: a file is missing or has another size, as seen from this machine.
    """
    folder = NewFolder(step_folder(root, step))
    for name, entry in files.items():
        path = folder.partial / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CheckpointError(
                f"{path} was written by a rank and is not seen whole from here. The checkpoint folder must lie on a "
                "file system that all nodes share"
            )
    described = {
        "global_step": step,
        LINEAGE: lineage,
        "files": {name: asdict(entry) for name, entry in sorted(files.items())},
    }
    write_bytes(folder.partial / MANIFEST, json.dumps({"format": 1, **described}, indent=1).encode())
    folder.commit()
    replace_text(root / LATEST, str(step))
    return folder.path


def discard(root: Path, step: int) -> None:
    """Remove what was written of ``step`` but not committed; what cannot be removed is removed at the next save."""
    NewFolder(step_folder(root, step)).discard()


def repair(root: Path) -> None:
    """Restore folders whose replacement was interrupted between two renames."""
    for step, _ in _folders(root, REPLACED):
        put_back(step_folder(root, step))


# ---- reading ------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Read the file entries of a saved step.

    Raises:
        CheckpointError: the manifest is missing, unreadable, or names files outside the folder.
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


def read_lineage(folder: Path, fallback: str) -> Lineage | None:
    """Read the lineage of a saved step from its manifest, or the file ``fallback`` beside it; None if unreadable."""
    for name in (MANIFEST, fallback):
        try:
            described = json.loads((folder / name).read_bytes())
            lineage = described.get(LINEAGE) or [[UNKNOWN, described["global_step"]]]
            return [(str(run), int(last)) for run, last in lineage]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError):
            logger.debug("%s does not say which run it is of", folder / name)
    return None


def contains_step(lineage: Lineage, step: int, run: str) -> bool:
    """Return whether ``lineage`` has ``step`` as saved by ``run``; another process may have saved the same number."""
    return any(run == process and step <= last for process, last in lineage)


def wrong_sizes(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """List missing files and files whose size differs from the manifest; reads no content."""
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != entry.size:
            problems.append(f"{path} has {size} bytes instead of {entry.size}")
    return problems


def wrong_contents(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """List files whose checksum differs from the manifest; reads every byte."""
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
    folders = [(int(m.group(1)), path) for path in root.glob("global_step_*") if (m := pattern.fullmatch(path.name))]
    return sorted(folders)
