"""Sixty-four samples of which eight hang, exit, eat memory or raise: what becomes of each, and how long it takes.

    python -m benchmarks.hostile_rewards [--timeout_s 5] [--num_workers 1]

Prints what it finds and writes nothing. A sample that hangs costs its limit, so the defaults take minutes at most.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from verl.base.import_utils import load_object
from verl.supervision.killable_pool import Budget
from verl.workers.reward_manager.function import RewardFunction, RewardSample

REWARD = """
import os, re, sys, time

def hog():
    kept = []
    while True:
        kept.append(bytearray(2**24))

ACTS = {
    "sleeps": lambda: time.sleep(3600),
    "spins": lambda: any(iter(int, 1)),
    "hangs in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "eats memory": hog,
    "raises": lambda: 1 / 0,
}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    ACTS.get(data_source, lambda: None)()
    return float(solution_str == ground_truth)

async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    return compute_score(data_source, solution_str, ground_truth, extra_info)
"""
BAD = {
    5: "sleeps", 6: "spins", 23: "hangs in C", 41: "sleeps",
    10: "os._exit", 30: "sys.exit", 50: "eats memory", 60: "raises",
}  # fmt: skip
WANTED = {"sleeps": "timeout", "spins": "timeout", "hangs in C": "timeout", "os._exit": "crashed"}
WANTED |= {"sys.exit": "crashed", "eats memory": "out_of_memory", "raises": "error"}


def measure(name: str, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my_reward.py"
        path.write_text(REWARD)
        budget = Budget(arguments.timeout_s, memory_mb=256)
        function = RewardFunction(
            load_object(str(path), name, "custom_reward_function"), {}, num_workers=arguments.num_workers, budget=budget
        )
        samples = [RewardSample(BAD.get(n, "fine"), str(n % 2), "1", {}) for n in range(64)]
        started = time.perf_counter()
        scores = function.score_samples(samples)
        elapsed = time.perf_counter() - started
        function.close()
    right = sum(s.status == "ok" and s.value == n % 2 for n, s in enumerate(scores) if n not in BAD)
    named = sum(scores[n].status == WANTED[how] for n, how in BAD.items())
    print(f"\n{name}, {arguments.num_workers} worker(s), {arguments.timeout_s:g} s for a sample")
    for n, how in sorted(BAD.items()):
        print(f"  sample {n:2}  {how:12} {scores[n].status}")
    print(f"  statuses: {dict(Counter(s.status for s in scores))}")
    print(f"  right scores: {right} of 56, right statuses: {named} of 8")
    print(f"  {elapsed:.2f} s, {elapsed / arguments.timeout_s:.2f} times the limit")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout_s", type=float, default=5.0, help="seconds for a sample")
    parser.add_argument("--num_workers", type=int, default=1, help="processes that score")
    given = parser.parse_args()
    for form in ("compute_score", "compute_score_async"):
        measure(form, given)


if __name__ == "__main__":
    main()
