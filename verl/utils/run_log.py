"""What happened to a run beside its metrics: starts with their settings, stages, alerts, checkpoints, ends.

The tracker ``file`` writes ``{name}.run.jsonl`` beside ``{name}.jsonl``, one JSON object per line::

    {"event": "start", "time": ..., "run": id, "config": {...}, "resumed_after": 0, "host": ..., "pid": ..., ...}
    {"event": "step", "time": ..., "run": id, "step": 1, "spans": [["gen", begin, end], ...]}
    {"event": "alert", "time": ..., "run": id, "step": 7, "rule": "grad_spike", "reason": ...}
    {"event": "checkpoint", "time": ..., "run": id, "step": 100, "folder": ...}
    {"event": "end", "time": ..., "run": id, "status": "done"}
"""

from __future__ import annotations

import json
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

_AHEAD_S = time.time() - time.monotonic()


def clock() -> float:
    """Return seconds since 1970 as the wall showed them when this process began: differences are true durations."""
    return _AHEAD_S + time.monotonic()


EndStatus = Literal["done", "stopped", "failed"]
"""``stopped``: by a signal, after the state was saved."""


def run_log_path(metrics: Path) -> Path:
    """Return the file of events beside a file of metrics."""
    return metrics.with_suffix(".run.jsonl")


class RunLog:
    """Appends events to the file beside a file of metrics.

    Args:
        metrics: the file of metrics.
        run: id of the run.
    """

    def __init__(self, metrics: Path, run: str) -> None:
        self.run = run
        self._file = run_log_path(metrics).open("a", encoding="utf-8")

    def start(self, config: Mapping[str, Any]) -> None:
        """Record the settings (without secrets), the command, the machine and the process."""
        process = psutil.Process()
        self.write(
            "start",
            config=config,
            command=shlex.join(sys.argv),
            host=socket.gethostname(),
            pid=process.pid,
            process_began=process.create_time(),
            environment=environment(),
        )

    def write(self, event: str, **details: Any) -> None:
        """Append an event and flush it, so that it is kept if the process is killed."""
        record = {"event": event, "time": round(clock(), 3), "run": self.run} | details
        self._file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def environment() -> dict[str, str]:
    """Return the versions and the machine of this process, for the record of a run."""
    modules = {name: sys.modules.get(name) for name in ("verl", "torch", "transformers", "ray", "vllm", "sglang")}
    versions = {name: str(getattr(module, "__version__", "?")) for name, module in modules.items() if module}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}
