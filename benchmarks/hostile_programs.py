"""Hostile programs in the sandbox: what each is reported as and what harm it does; and what a run costs.

    python -m benchmarks.hostile_programs

The programs are those of ``tests/support/hostile_programs.py``. The exit code is 1 if one did harm or was reported as
something that it is not.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.hostile_programs import judge, machine, programs
from verl.plugins.sandbox import Sandbox


def hostile_table(sandbox: Sandbox) -> int:
    """Print a row per program; return how many rows are not as they should be."""
    print("| program | reported as | seconds | harm |\n|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as folder, machine(Path(folder)) as host:
        for hostile in programs(host.port, host.secret):
            outcome, harm = judge(sandbox, hostile, host)
            detail = f" ({outcome.signal or f'exit code {outcome.exit_code}'})" if not outcome.ok else ""
            detail = detail if outcome.signal or outcome.exit_code else ""
            is_wrong = outcome.status not in hostile.statuses
            bad += bool(harm) or is_wrong
            status = f"{outcome.status}{detail}" + (" (WRONG)" if is_wrong else "")
            print(f"| {hostile.name} | {status} | {outcome.seconds:.2f} | {'; '.join(harm) or 'none'} |", flush=True)
    return bad


def cost(runs: int) -> None:
    """Print what a run of an empty program costs."""
    sandbox = Sandbox(max_concurrent=os.cpu_count())
    sandbox.run("")
    seconds = sorted(sandbox.run("").seconds for _ in range(runs))
    start = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda _: sandbox.run(""), range(runs)))
    rate = runs / (time.monotonic() - start)
    print(
        f"\nEmpty program, {runs} runs, {os.cpu_count()} cores, Python {platform.python_version()}: "
        f"median {statistics.median(seconds) * 1000:.0f} ms, 95% below {seconds[int(runs * 0.95)] * 1000:.0f} ms; "
        f"{rate:.0f} runs per second in parallel."
    )


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of an empty program")
    arguments = parser.parse_args()
    bad = hostile_table(Sandbox())
    cost(arguments.runs)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
