"""What a call of a worker group costs: a batch to the ranks and back, and the call itself.

The way there and back ends when the driver holds the joined result in memory of its own; on the way every rank
has copied its rows into memory of its own as well, and returned them from there. The yardstick is one plain
memory copy of the same bytes: ``tensor.clone()`` of each column, on one thread of the driver, whose allocator
keeps freed memory as in a run, so that no page is new. A copy into new pages is shown too: what it takes longer is
what the kernel needs to map and clear them. All are taken in turns, round by round, in one run; ratios are
between medians, and between minima. ::

    python -m benchmarks.dataproto_transfer [--mb 100] [--columns 10] [--ranks 2] [--json transfer.json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import ray
import torch
from omegaconf import OmegaConf

from verl.backends.cpu.allocator import keep_freed_memory
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, run_task

MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="dp")
WARM_UP = 3
CALLS = 300


class Mirror(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        keep_freed_memory()  # as every worker with an engine on a CPU does
        self._register_dispatch_collect_info("dp", self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None

    @register(dispatch_mode=MESH)
    def take(self, batch):
        # Reading the columns copies them into this process.
        return DataProto(meta_info={"width": batch.batch["column_0"].shape[1]})

    @register(dispatch_mode=MESH)
    def reflect(self, batch):
        return DataProto(batch.batch)


def into_new_pages(column: torch.Tensor) -> torch.Tensor:
    """A copy in memory that the kernel has not given out before."""
    pages = mmap.mmap(-1, column.nbytes)
    return torch.frombuffer(pages, dtype=column.dtype).view_as(column).copy_(column)


def rounds_of(timed: dict[str, Callable[[], object]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each, all once per round."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + warm_up):
        for name, call in timed.items():
            start = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: values[warm_up:] for name, values in times.items()}


class Benchmark:
    """Starts the workers and takes the times; ``run_task`` puts Ray around it, with the settings of a run."""

    def run(self, config: argparse.Namespace) -> None:
        group = RayWorkerGroup(RayResourcePool([config.ranks], use_gpu=False), RayClassWithInitArgs(Mirror))
        group.init_model()
        rows = 1024 // config.ranks * config.ranks
        width = config.mb * 10**6 // (4 * config.columns * rows)
        batch = DataProto.from_dict({f"column_{i}": torch.rand(rows, width) for i in range(config.columns)})
        columns = list(batch.batch.values())

        batches = rounds_of(
            {
                "copy": lambda: [column.clone() for column in columns],
                "copy_into_new_pages": lambda: [into_new_pages(column) for column in columns],
                "to_the_ranks": lambda: group.take(batch),
                "there_and_back": lambda: group.reflect(batch),
            },
            config.rounds,
            WARM_UP,
        )
        calls = rounds_of(
            {
                "call": group.nothing,
                "call_of_bare_ray": lambda: ray.get([worker.nothing.remote() for worker in group.workers]),
            },
            CALLS,
            WARM_UP,
        )
        report(batches | calls, sum(column.nbytes for column in columns), config)


def report(times: dict[str, list[float]], num_bytes: int, config: argparse.Namespace) -> None:
    """Print the table, and write the numbers if asked to."""
    found: dict[str, Any] = {
        name: {"median_ms": statistics.median(values) * 1e3, "min_ms": min(values) * 1e3}
        for name, values in times.items()
    }
    for kind in ("median", "min"):
        trip, copy = (found[name][f"{kind}_ms"] for name in ("there_and_back", "copy"))
        found[f"there_and_back_per_copy_{kind}"] = trip / copy
    print(f"{num_bytes / 1e6:.0f} MB in {config.columns} columns, {config.ranks} ranks, {os.cpu_count()} cores")
    print(f"{'':28}{'median ms':>10}{'min ms':>10}{'copies':>9}")
    for name in times:
        median, least = found[name]["median_ms"], found[name]["min_ms"]
        copies = "" if name.startswith("call") else f"{median / found['copy']['median_ms']:9.2f}"
        print(f"{name.replace('_', ' '):28}{median:10.2f}{least:10.2f}{copies:>9}")
    if config.json:
        setting = {
            "bytes": num_bytes, "columns": config.columns, "ranks": config.ranks, "rounds": config.rounds,
            "cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "ray": ray.__version__,
        }  # fmt: skip
        Path(config.json).write_text(json.dumps({"setting": setting, "results": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    start_ray = {"num_cpus": None, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    args = parser.parse_args()
    start_ray["num_cpus"] = args.ranks
    run_task(Benchmark, args, OmegaConf.create({"ray_init": start_ray, "timeline_json_file": None}))


if __name__ == "__main__":
    main()
