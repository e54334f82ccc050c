"""Measure what the record of the ranks' calls costs (the Time view of `verl view`).

python -m benchmarks.call_times --ranks 2

Printed are the time that a worker adds to each call, the time of the fetch from all ranks on Ray once a step, and the
bytes that a step of eight calls per rank takes on disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from verl.single_controller.base import Worker
from verl.single_controller.base.call_times import CallTime, take_call_times, timed_call
from verl.utils.run_log import rank_columns

CALLS = 8
"""Calls of a rank in a step: PPO with a critic and a reference makes about so many."""


class Idle(Worker):
    """A worker that answers calls with nothing."""

    def answer(self, calls: int) -> None:
        """Do nothing, in so many timed calls."""
        for _ in range(calls):
            with timed_call("Idle.answer"):
                pass


def per_call_us(repeats: int = 5_000) -> float:
    """Microseconds that the measurement adds to a call."""
    began = time.perf_counter()
    for _ in range(repeats):
        with timed_call("Idle.answer"):
            pass
    seconds = time.perf_counter() - began
    take_call_times()
    return 1e6 * seconds / repeats


def per_fetch_ms(ranks: int, repeats: int = 50) -> float:
    """Milliseconds of a fetch of ``CALLS`` calls from each rank on Ray, the median."""
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.init(address="local", num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool([ranks], use_gpu=False)
    group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(Idle))
    taken = []
    for _ in range(repeats):
        group.execute_all_sync("answer", CALLS)
        began = time.perf_counter()
        found = group.execute_all_sync("take_call_times")
        taken.append(time.perf_counter() - began)
        assert [len(calls) for calls in found] == [CALLS] * ranks
    group.shutdown()
    ray.shutdown()
    return 1e3 * statistics.median(taken)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(f"a call: {per_call_us():.0f} us more")
    print(f"a fetch from {args.ranks} ranks, once a step: {per_fetch_ms(args.ranks):.1f} ms")
    calls = {
        f"global_pool {rank}": [
            CallTime(f"ActorRolloutRefWorker.method_{k}", 1e9 + k, 1e9 + k + 0.5, 20_000.0, 70_000.0)
            for k in range(CALLS)
        ]
        for rank in range(args.ranks)
    }
    print(f"a step on disk: {len(json.dumps(rank_columns(calls))):,} bytes")


if __name__ == "__main__":
    main()
