"""Does the gsm8k scorer read real solutions? Each against its own answer, and against another number.

    python -m benchmarks.gsm8k_scores data/gsm8k/train.parquet data/gsm8k/test.parquet

The files are made by ``examples/data_preprocess/gsm8k.py``. Prints a table and writes nothing.
"""

from __future__ import annotations

import argparse

import pyarrow.parquet as pq

from verl.scorers.gsm8k import compute_score


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="parquet files that examples/data_preprocess/gsm8k.py made")
    files = parser.parse_args().files
    print("| file | solutions | method | own answer scores 1 | another number scores 1 |\n|---|---|---|---|---|")
    for path in files:
        rows = pq.read_table(path).to_pylist()
        for method in ("strict", "flexible"):
            pairs = [(row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) for row in rows]
            own = sum(compute_score(text, truth, method=method) == 1.0 for text, truth in pairs)
            other = sum(
                compute_score(text, str(int(truth.replace(",", "")) + 1), method=method) for text, truth in pairs
            )
            print(f"| {path} | {len(rows)} | {method} | {own} | {other:.0f} |")


if __name__ == "__main__":
    main()
