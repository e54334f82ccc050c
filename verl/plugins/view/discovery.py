"""Find the files of runs in folders: metrics, events, samples, tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl.utils.run_log import ranks_log_path, run_log_path

if TYPE_CHECKING:
    from verl.base.types import JsonObject

Kind = Literal["train", "validation"]

SKIPPED = ("global_step_", ".", "__pycache__", "bad_batches")
"""Beginnings of names of folders that hold no records."""
PEEK_BYTES = 65_536  # the first line of a file of metrics is shorter; of another file no more is read


@dataclass(frozen=True)
class NamedFolder:
    """A folder that a run's settings name for its samples; it need not exist."""

    path: Path
    kind: Kind


@dataclass
class RunFiles:
    """The files of one run, or of several that were written into one file of metrics."""

    metrics: Path
    id: str
    name: str
    writers: frozenset[str]
    """Ids of these runs, as their lines and their samples have them under ``run``."""
    starts: list[JsonObject]
    """Events of starts; empty without a record of the run."""
    named: list[NamedFolder] = field(default_factory=list)

    @property
    def events(self) -> Path:
        """The file of starts, checkpoints and ends; it need not exist."""
        return run_log_path(self.metrics)

    @property
    def ranks(self) -> Path:
        """The file of the ranks' calls; it need not exist."""
        return ranks_log_path(self.metrics)

    def kind_of(self, folder: Path) -> Kind:
        """The kind of the samples of a folder: as the settings say, else by its name."""
        kinds: list[Kind] = [dump.kind for dump in self.named if dump.path == folder]
        by_name: Kind = "validation" if "val" in folder.name else "train"
        return kinds[-1] if kinds else by_name


@dataclass(frozen=True)
class DumpFolder:
    """A folder of ``{step}.jsonl`` files of samples, with ``{step}.arrow`` files of tokens beside them.

    Args:
        path: of the folder.
        owner: id of the run that has those files which do not name their run; None if no run is known to have them.
    """

    path: Path
    owner: str | None


@dataclass
class FoundFiles:
    """Runs, and folders of samples: theirs and those that were found."""

    runs: list[RunFiles]
    dumps: list[DumpFolder]

    def owner(self, folder: DumpFolder, writer: str) -> RunFiles | None:
        """The run of a file of samples: by the id in its lines; a file of an older version has that of its folder."""
        if not writer:
            return next((run for run in self.runs if run.id == folder.owner), None)
        # A copy of a run's files has the same id: each has the folder that is nearer to it.
        same = [run for run in self.runs if writer in run.writers]
        return max(same, key=lambda run: _shared(folder.path, run), default=None)


def find_runs(folders: Iterable[Path]) -> FoundFiles:
    """Find the runs below folders, and their samples wherever they are; a file is taken as metrics itself."""
    metrics: list[Path] = []
    dumps: set[Path] = set()
    for folder in folders:
        if folder.is_file():
            metrics.append(folder.resolve())
            dumps |= {path for path in _walk(folder.resolve().parent) if path.is_dir()}
            continue
        for path in _walk(folder.resolve()):
            if path.is_dir():
                dumps.add(path)
            else:
                metrics.append(path)
    metrics = sorted(set(metrics))
    names = _short_names(metrics)
    runs = [_run_files(path, names[path]) for path in metrics]
    dumps |= {dump.path for run in runs for dump in run.named if _has_samples(dump.path)}
    return FoundFiles(runs, [DumpFolder(path, _owner(path, runs)) for path in sorted(dumps)])


def metrics_problem(file: Path) -> str | None:
    """Say why a file that the user named is no file of metrics; None if it is one, or an empty one to be written."""
    if file.name.endswith((".run.jsonl", ".ranks.jsonl")):
        metrics_file = file.with_name(file.name.removesuffix(".jsonl").rpartition(".")[0] + ".jsonl")
        return f"{file} lies beside the metrics of a run and is read with them. Name {metrics_file}, or the folder."
    try:
        is_empty = file.stat().st_size == 0
        with file.open("rb"):
            pass
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}. Change its permissions, or name another run."
    if not is_empty and not _is_metrics(file):
        return f"{file} holds no metrics: its first line is none of the tracker `file`. Name such a file, or a folder."
    return None


def read_events(path: Path) -> list[dict[str, object]]:
    """Read a file of events; a line that is not complete yet is left out, and so is a file that is not there."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [record for line in lines if isinstance(record := _json(line), dict) and "event" in record]


def read_starts(path: Path) -> list[dict[str, object]]:
    """Return the events of starts in a file of events, in order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    # Of ten thousand lines a few are starts: the others are not parsed.
    records = [_json(line) for line in lines if b'"start"' in line]
    return [record for record in records if isinstance(record, dict) and record.get("event") == "start"]


def read_config(path: Path) -> dict[str, object]:
    """Return the settings of the last start in a file of events; empty without one."""
    starts = read_starts(path)
    config = starts[-1].get("config") if starts else None
    return config if isinstance(config, dict) else {}


def began(start: Mapping[str, object]) -> float:
    """Return when a start was, in seconds since 1970; 0 if its record does not say it."""
    time = start.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


def _run_files(metrics: Path, name: str) -> RunFiles:
    starts = read_starts(run_log_path(metrics))
    writers = {str(start["run"]) for start in starts if start.get("run")} or {writer_of(metrics)} - {""}
    run_id = hashlib.blake2s(str(metrics).encode(), digest_size=6).hexdigest()
    run = RunFiles(metrics, run_id, name, frozenset(writers), starts)
    run.named = [dump for start in starts for dump in _named_folders(start, metrics)]
    return run


def writer_of(file: Path) -> str:
    """Return the id of the run that wrote a file of metrics or samples; empty if its first line does not name it."""
    try:
        with file.open("rb") as opened:
            record = _json(opened.readline())
    except OSError:
        return ""
    return str(record.get("run") or "") if isinstance(record, dict) else ""


def _named_folders(start: Mapping[str, object], metrics: Path) -> Iterator[NamedFolder]:
    """The folders of samples of a start; a relative one begins at the folder in which the run was started.

    A record of an older version does not have that folder: then it is the nearest above the metrics that makes sense.
    """
    config = start.get("config")
    trainer = config.get("trainer") if isinstance(config, Mapping) else None
    if not isinstance(trainer, Mapping):
        return
    keys: dict[Kind, str] = {"train": "rollout_data_dir", "validation": "validation_data_dir"}
    for kind, key in keys.items():
        if isinstance(name := trainer.get(key), str) and name and "\0" not in name:
            path, cwd = Path(os.path.expanduser(name)), start.get("cwd")
            if path.is_absolute():
                yield NamedFolder(Path(os.path.realpath(path)), kind)
            elif isinstance(cwd, str) and "\0" not in cwd:
                yield NamedFolder(Path(os.path.realpath(Path(cwd, path))), kind)
            elif above := [parent / path for parent in metrics.parents if _has_samples(parent / path)]:
                yield NamedFolder(above[0].resolve(), kind)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield files of metrics, and folders of samples."""
    for parent, children, files in os.walk(folder):
        children[:] = sorted(name for name in children if not name.startswith(SKIPPED))
        lines = [name for name in files if name.endswith(".jsonl")]
        if any(name[:-6].isdecimal() for name in lines):
            yield Path(parent)
        for name in sorted(lines):
            path = Path(parent) / name
            if name.endswith(".run.jsonl"):
                metrics_file = path.with_name(name.removesuffix(".run.jsonl") + ".jsonl")
                if not _has_lines(metrics_file) and read_starts(path):  # a run that has made no step yet, or never did
                    yield metrics_file
            elif not name[:-6].isdecimal() and not name.endswith(".ranks.jsonl") and _is_metrics(path):
                yield path


def _has_samples(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".jsonl") and entry.name[:-6].isdecimal() for entry in entries)
    except OSError:
        return False


def _has_lines(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _is_metrics(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = file.readline(PEEK_BYTES)
    except OSError:
        return False
    record = _json(first)
    return isinstance(record, dict) and "step" in record and ("data" in record or "table" in record)


def _json(line: str | bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _short_names(paths: list[Path]) -> dict[Path, str]:
    """Name each file by its path below the folder that all share, without what all end with."""
    if not paths:
        return {}
    common = Path(os.path.commonpath([path.parent for path in paths]))
    names = {path: path.relative_to(common).with_suffix("").parts for path in paths}
    if len(paths) == 1:
        return {path: common.name if parts == ("metrics",) else "/".join(parts) for path, parts in names.items()}
    if len({parts[-1] for parts in names.values()}) == 1 and all(len(parts) > 1 for parts in names.values()):
        names = {path: parts[:-1] for path, parts in names.items()}
    return {path: "/".join(parts) for path, parts in names.items()}


def _owner(folder: Path, runs: list[RunFiles]) -> str | None:
    """The run that has the files of a folder which do not name theirs.

    It is the run whose settings name the folder, of several the one that was started last. Else it is the one run, of
    those whose settings are not recorded, whose metrics share the longest part of the path; of several equal ones none.
    """
    naming = [run for run in runs if any(dump.path == folder for dump in run.named)]
    if naming:
        return max(naming, key=lambda run: began(run.starts[-1])).id
    unknown = [run for run in runs if not run.named and not _names_no_folder(run)]
    longest = max((_shared(folder, run) for run in unknown), default=0)
    nearest = [run for run in unknown if _shared(folder, run) == longest]
    return nearest[0].id if len(nearest) == 1 else None


def _names_no_folder(run: RunFiles) -> bool:
    """Return whether the record says that the run wrote no samples."""
    trainers = [start["config"].get("trainer") for start in run.starts if isinstance(start.get("config"), Mapping)]
    keys = ("rollout_data_dir", "validation_data_dir")
    return bool(trainers) and all(
        isinstance(trainer, Mapping) and any(key in trainer for key in keys) and not any(map(trainer.get, keys))
        for trainer in trainers
    )


def _shared(folder: Path, run: RunFiles) -> int:
    return len(os.path.commonpath([folder, run.metrics]))
