"""Sums of two numbers in words of a prompt, for training and held out: no pair of numbers is in both, in any order.

python examples/quickstart_real/make_task.py --output_dir outputs/quickstart-real/task
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

import pyarrow as pa
import pyarrow.parquet as pq

from examples.data_preprocess._common import Row, rl_row

DATA_SOURCE = "sums"


def make_rows(pairs: list[tuple[int, int]], split: str) -> list[Row]:
    """Rows that ``RLHFDataset`` and the reward read."""
    return [
        rl_row(DATA_SOURCE, f"What is {a} + {b}? Reply with the number only.", "math", str(a + b), split, index)
        for index, (a, b) in enumerate(pairs)
    ]


def make_splits(seed: int, max_number: int, test_size: int) -> dict[str, list[Row]]:
    """All pairs of numbers from 1 on: some held out, the rest for training in both orders, shuffled."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations_with_replacement(range(1, max_number + 1), 2))
    rng.shuffle(pairs)
    test = [rng.choice([(a, b), (b, a)]) for a, b in pairs[:test_size]]
    train = sorted({pair for a, b in pairs[test_size:] for pair in ((a, b), (b, a))})
    rng.shuffle(train)
    return {"train": make_rows(train, "train"), "test": make_rows(test, "test")}


def truths(rows: list[Row]) -> list[str]:
    """The right answers."""
    return [row["reward_model"]["ground_truth"] for row in rows]


def most_frequent_accuracy(splits: dict[str, list[Row]]) -> float:
    """Held-out accuracy of always giving the answer that is most frequent in training."""
    (answer, _), *_ = Counter(truths(splits["train"])).most_common(1)
    return truths(splits["test"]).count(answer) / len(splits["test"])


def main() -> None:
    """Write rl_train.parquet and rl_test.parquet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the split and the order")
    parser.add_argument("--max_number", type=int, default=30)
    parser.add_argument("--test_size", type=int, default=100)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for split, rows in make_splits(args.seed, args.max_number, args.test_size).items():
        pq.write_table(pa.Table.from_pylist(rows), args.output_dir / f"rl_{split}.parquet")
        print(f"{split}: {len(rows)} prompts, the first: {rows[0]['prompt'][0]['content']}")


if __name__ == "__main__":
    main()
