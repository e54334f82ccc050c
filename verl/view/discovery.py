"""Find the files of runs in folders: metrics, events, samples, tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl.utils.run_log import ranks_log_path, run_log_path

Kind = Literal["train", "validation"]

SKIPPED = ("global_step_", ".", "__pycache__", "bad_batches")
"""Beginnings of names of folders that hold no records."""
PEEK_BYTES = 65_536


@dataclass(frozen=True)
class DumpFolder:
    """A folder of ``{step}.jsonl`` files of samples, with ``{step}.arrow`` files of tokens beside them."""

    path: Path
    kind: Kind


@dataclass
class RunFiles:
    """The files of one run, or of several that were written into one file of metrics."""

    metrics: Path
    id: str
    name: str
    dumps: list[DumpFolder] = field(default_factory=list)

    @property
    def events(self) -> Path:
        """The file of starts, checkpoints and ends; it need not exist."""
        return run_log_path(self.metrics)

    @property
    def ranks(self) -> Path:
        """The file of the ranks' calls; it need not exist."""
        return ranks_log_path(self.metrics)


def find_runs(folders: Iterable[Path]) -> list[RunFiles]:
    """Find the runs below folders; a file is taken as the metrics of a run itself."""
    metrics: list[Path] = []
    dumps: list[Path] = []
    for folder in folders:
        if folder.is_file():
            metrics.append(folder.resolve())
            dumps += [path for path in _walk(folder.resolve().parent) if path.is_dir()]
            continue
        for path in _walk(folder.resolve()):
            if path.is_dir():
                dumps.append(path)
            else:
                metrics.append(path)
    metrics = sorted(set(metrics))
    names = _short_names(metrics)
    runs = [RunFiles(path, _id_of(path), names[path]) for path in metrics]
    settings = {run.id: read_config(run.events) for run in runs}
    for path in sorted(set(dumps)):
        owner = _owner(path, runs, settings)
        if owner is not None:
            owner.dumps.append(DumpFolder(path, _kind_of(path, settings[owner.id])))
    return runs


def metrics_problem(file: Path) -> str | None:
    """Say why a file that the user named is no file of metrics; None if it is one, or an empty one to be written."""
    if file.name.endswith((".run.jsonl", ".ranks.jsonl")):
        own = file.with_name(file.name.removesuffix(".jsonl").rpartition(".")[0] + ".jsonl")
        return f"{file} lies beside the metrics of a run and is read with them. Name {own}, or the folder."
    try:
        is_empty = file.stat().st_size == 0
        with file.open("rb"):
            pass
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}. Change its permissions, or name another run."
    if not is_empty and not _is_metrics(file):
        return f"{file} holds no metrics: its first line is none of the tracker `file`. Name such a file, or a folder."
    return None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read a file of events; a line that is not complete yet is left out, and so is a file that is not there."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [record for line in lines if isinstance(record := _json(line), dict) and "event" in record]


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings of the last start in a file of events; empty without one."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    # Of ten thousand lines a few are starts: the others are not parsed.
    starts = [record for line in lines if b'"start"' in line and isinstance(record := _json(line), dict)]
    found = [record for record in starts if record.get("event") == "start"]
    config = found[-1].get("config") if found else None
    return config if isinstance(config, dict) else {}


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
                own = path.with_name(name.removesuffix(".run.jsonl") + ".jsonl")
                if not _has_lines(own) and read_config(path):  # a run that has made no step yet, or never did
                    yield own
            elif not name[:-6].isdecimal() and not name.endswith(".ranks.jsonl") and _is_metrics(path):
                yield path


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


def _json(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _id_of(path: Path) -> str:
    return hashlib.blake2s(str(path).encode(), digest_size=6).hexdigest()


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


def _owner(folder: Path, runs: list[RunFiles], settings: Mapping[str, Mapping[str, Any]]) -> RunFiles | None:
    """The run whose settings name the folder, else the one whose file shares the longest part of the path with it."""
    for run in runs:
        if str(folder) in _configured(settings[run.id]).values():
            return run
    shared = {run.id: len(os.path.commonpath([folder, run.metrics])) for run in runs}
    return max(runs, key=lambda run: shared[run.id], default=None)


def _configured(config: Mapping[str, Any]) -> dict[str, str]:
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        return {}
    names = {"train": "rollout_data_dir", "validation": "validation_data_dir"}
    return {kind: os.path.abspath(trainer[name]) for kind, name in names.items() if isinstance(trainer.get(name), str)}


def _kind_of(folder: Path, config: Mapping[str, Any]) -> Kind:
    configured = _configured(config)
    if str(folder) == configured.get("validation"):
        return "validation"
    if str(folder) == configured.get("train"):
        return "train"
    return "validation" if "val" in folder.name else "train"
