"""Measure how fast `verl view` opens a made-up run of 10,000 steps with 300 metrics and 2 million samples.

python -m benchmarks.view_speed --folder /tmp/made_up

The files (about 900 MB) are made once. Printed are the seconds until the first index was made, and then, with the index
there: from the start of the command to the answer with the runs, and further to twelve curves and a page of samples.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from tests.support.made_up_run import metrics_line, write_events, write_samples

TOKEN = "benchmark"


def make(folder: Path, steps: int, metrics: int, samples: int) -> None:
    """Write the files, unless they are there."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_line(step, metrics, draw)) + "\n")
    write_events(folder, steps, 0, ended=True)
    for step in range(1, steps + 1):
        write_samples(folder / "rollouts", step, samples // steps // 8, 8, draw)
    (folder / "done").touch()


def free_port() -> int:
    """A port that nothing uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def opened(folder: Path, is_ready: Callable[[dict], bool]) -> dict[str, float]:
    """Start the command, and return the seconds until each answer."""
    port = free_port()
    began = time.monotonic()
    command = [sys.executable, "-m", "verl", "view", str(folder), "--port", str(port)]
    environment = os.environ | {"VERL_VIEW_TOKEN": TOKEN}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def ask(path: str, **parameters: Any) -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx2.get(f"http://127.0.0.1:{port}/api/{path}", params=parameters, headers=headers, timeout=600)
        return answer.json()

    try:
        seconds: dict[str, float] = {}
        while "runs" not in seconds:
            try:
                found = ask("runs")
                if is_ready(found):
                    seconds["runs"] = time.monotonic() - began
                    continue
            except httpx2.TransportError:
                pass
            time.sleep(0.02)
        run = found["runs"][0]["id"]
        names = ask("details", run=run)[run]["metrics"][:12]
        ask("series", run=run, name=names)
        seconds["curves"] = time.monotonic() - began
        ask("samples", run=run)
        seconds["samples"] = time.monotonic() - began
        for name, parameters in {
            "best": {"sort": "score"}, "longest": {"sort": "length"}, "filtered": {"score_to": 0, "source": "gsm8k"},
            "searched": {"text": "try 777"},
        }.items():  # fmt: skip
            start = time.monotonic()
            ask("samples", run=run, **parameters)
            seconds[f"then samples: {name}"] = time.monotonic() - start
        return seconds
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/verl_view_speed"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2_000_000)
    args = parser.parse_args()
    make(args.folder, args.steps, args.metrics, args.samples)
    shutil.rmtree(args.folder / ".verl_view", ignore_errors=True)

    def has_all(found: dict) -> bool:
        index = sum(file.stat().st_size for file in args.folder.glob(".verl_view/*"))
        return bool(found["runs"]) and not found["indexing"] and index > 0 and found["runs"][0]["step"] is not None

    print(f"first index: {opened(args.folder, has_all)['runs']:.1f} s")
    size = sum(file.stat().st_size for file in args.folder.glob(".verl_view/*"))
    print(f"index: {size / 2**20:,.0f} MB")
    for name, seconds in opened(args.folder, lambda found: bool(found["runs"]) and found["runs"][0]["step"]).items():
        print(f"{name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
