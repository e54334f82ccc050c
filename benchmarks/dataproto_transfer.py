"""What a call of a worker group costs: the call itself, and a batch to the ranks and back.

The yardstick is a copy of the same batch into fresh memory, measured in the same run, so that the ratio
says something on any machine: a batch that arrives was written to the object store and copied out of it
once, so two copies each way are the least. ::

    python benchmarks/dataproto_transfer.py [--mb 100] [--ranks 2] [--repeats 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="dp")
COLUMNS = 10


class Mirror(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self._register_dispatch_collect_info("dp", self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None

    @register(dispatch_mode=MESH)
    def take(self, batch):
        return DataProto(meta_info={"metrics": {"width": batch.batch["column_0"].shape[1]}})

    @register(dispatch_mode=MESH)
    def reflect(self, batch):
        return batch


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    ray.init(num_cpus=args.ranks, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    group = RayWorkerGroup(RayResourcePool([args.ranks], use_gpu=False), RayClassWithInitArgs(Mirror))
    group.init_model()
    rows = 1024 // args.ranks * args.ranks
    width = args.mb * 10**6 // (4 * COLUMNS * rows)
    batch = DataProto.from_dict({f"column_{i}": torch.rand(rows, width) for i in range(COLUMNS)})
    megabytes = sum(column.nbytes for column in batch.batch.values()) / 1e6

    # Into memory that is mapped already, and into fresh memory, as whoever receives a batch must.
    there = [torch.empty_like(column) for column in batch.batch.values()]
    into = seconds(lambda: [a.copy_(b) for a, b in zip(there, batch.batch.values(), strict=True)], args.repeats)
    fresh = seconds(lambda: [column.clone() for column in batch.batch.values()], args.repeats)
    to = seconds(lambda: group.take(batch), args.repeats)
    back = seconds(lambda: group.reflect(batch), args.repeats)
    call = seconds(group.nothing, 300)
    raw = seconds(lambda: ray.get([worker.nothing.remote() for worker in group.workers]), 300)

    print(f"{megabytes:.0f} MB in {COLUMNS} columns, {args.ranks} ranks, {os.cpu_count()} cores")
    print(f"{'':40}{'ms':>9}{'MB/s':>9}{'copies':>9}")
    for name, elapsed, moved in (
        ("copy in memory", into, megabytes),
        ("copy into fresh memory", fresh, megabytes),
        ("batch to the ranks", to, megabytes),
        ("batch to the ranks and back", back, 2 * megabytes),
    ):
        print(f"{name:40}{elapsed * 1e3:9.1f}{moved / elapsed:9.0f}{elapsed / fresh:9.1f}")
    print(f"{'a call of nothing, all ranks':40}{call * 1e3:9.2f}")
    print(f"{'the same with Ray alone':40}{raw * 1e3:9.2f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
