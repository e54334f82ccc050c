"""Log of a run's events beside its metrics: starts with their settings, stages, alerts, checkpoints, ends.

The tracker ``file`` writes ``{name}.run.jsonl`` beside ``{name}.jsonl``, one JSON object per line::

    {"event": "start", "time": ..., "run": id, "config": {...}, "resumed_after": 0, "host": ..., "cwd": ..., ...}
    {"event": "step", "time": ..., "run": id, "step": 1, "spans": [["gen", begin, end], ...]}
    {"event": "alert", "time": ..., "run": id, "step": 7, "rule": "grad_spike", "reason": ...}
    {"event": "checkpoint", "time": ..., "run": id, "step": 100, "folder": ...}
    {"event": "end", "time": ..., "run": id, "status": "done"}

What the ranks did is more, and read by the step, so it has a file of its own, ``{name}.ranks.jsonl``, a line per step
(:func:`rank_columns`)::

    {"event": "ranks", "time": ..., "run": id, "step": 1, "began": ..., "ranks": ["global_pool 0", ...],
     "calls": ["ActorRolloutRefWorker.update_actor", ...], "rows": [[rank, call, ms, ms, MiB, MiB or null], ...]}
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

SAMPLE_NUMBERS = ("gap", "kl", "advantage")
"""Statistics of a sample in the update, by which samples can be sorted; see :mod:`verl.experience.records`."""
_AHEAD_S = time.time() - time.monotonic()  # taken once: times stay in order if the clock is set


def clock() -> float:
    """Return seconds since 1970 as the wall showed them when this process began: differences are true durations."""
    return _AHEAD_S + time.monotonic()


ENGINES = "engines"
"""Name of the spans of a step in which engines on a pool of their own served, beside the stages."""
STAGE_NOTE = "This happened in stage"
"""Beginning of the note that a step adds to an error: it goes into the record of the run's end."""
EndStatus = Literal["done", "stopped", "failed"]
"""``stopped``: by a signal, after the state was saved."""


def json_text(value: object) -> str:
    """Write nested values as standard JSON: null for a number that is not finite, ``str`` of an unknown object."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # rare, so that nothing is copied otherwise
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name) if isinstance(name, float) else name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def run_log_path(metrics: Path) -> Path:
    """Return the file of events beside a file of metrics."""
    return metrics.with_suffix(".run.jsonl")


def ranks_log_path(metrics: Path) -> Path:
    """Return the file of the ranks' calls beside a file of metrics."""
    return metrics.with_suffix(".ranks.jsonl")


def rank_columns(calls: Mapping[str, Sequence[tuple[str, float, float, float, float | None]]]) -> dict[str, object]:
    """Return the calls of one step in the form of the file.

    Args:
        calls: by rank, each call's name, begin and end in seconds since 1970, and the MiB of resident memory and of
            reserved GPU memory (None without a GPU) at its end.

    Returns:
        ``began``, the first begin; ``ranks`` and ``calls``, the names; and ``rows``: for each call the numbers of its
        rank and name in these lists, its begin after ``began`` and its duration in ms, and both kinds of memory in MiB.
    """
    ranks = list(calls)
    names = sorted({call[0] for calls_of_rank in calls.values() for call in calls_of_rank})
    index_of_name = {name: index for index, name in enumerate(names)}
    began = min((call[1] for calls_of_rank in calls.values() for call in calls_of_rank), default=0.0)
    rows = [
        [
            rank, index_of_name[name], round(1e3 * (begin - began), 1), round(1e3 * (end - begin), 1), round(rss_mb),
            None if device_mb is None else round(device_mb),
        ]
        for rank, calls_of_rank in enumerate(calls.values())
        for name, begin, end, rss_mb, device_mb in calls_of_rank
    ]  # fmt: skip
    return {"began": round(began, 4), "ranks": ranks, "calls": names, "rows": rows}


class RunLog:
    """Appends events to the file beside a file of metrics.

    Args:
        metrics: the file of metrics.
        run: id of the run.
    """

    def __init__(self, metrics: Path, run: str) -> None:
        self.run = run
        self._file = run_log_path(metrics).open("a", encoding="utf-8")
        self._ranks = ranks_log_path(metrics).open("a", encoding="utf-8")

    def start(self, config: Mapping[str, object]) -> None:
        """Record the settings (without secrets), the command, its working folder, the machine and the process."""
        process = psutil.Process()
        self.write(
            "start",
            config=config,
            command=shlex.join(sys.orig_argv),  # as it was typed; sys.argv is what Hydra reads
            cwd=os.getcwd(),
            host=socket.gethostname(),
            pid=process.pid,
            process_began=process.create_time(),
            environment=environment(),
        )

    def write(self, event: str, **details: object) -> None:
        """Append an event to its file and flush it, so that it is kept if the process is killed."""
        record = {"event": event, "time": round(clock(), 3), "run": self.run} | details
        file = self._ranks if event == "ranks" else self._file
        file.write(json_text(record) + "\n")
        file.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._ranks.close()


def environment() -> dict[str, str]:
    """Return the versions and the machine of this process, for the record of a run."""
    modules = {name: sys.modules.get(name) for name in ("verl", "torch", "transformers", "ray", "vllm", "sglang")}
    versions = {name: str(getattr(module, "__version__", "?")) for name, module in modules.items() if module}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}
