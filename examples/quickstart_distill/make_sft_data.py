"""Rows for supervised training from the samples of a teacher: each response becomes a conversation.

python examples/quickstart_distill/make_sft_data.py --samples samples.parquet --output_file sft.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def conversations(rows: list[dict]) -> list[dict]:
    """One row for each response of :mod:`verl.trainer.main_generation`."""
    return [
        {"messages": [*row["prompt"], {"role": "assistant", "content": response}]}
        for row in rows
        for response in row["responses"]
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=Path, required=True, help="what main_generation wrote")
    parser.add_argument("--output_file", type=Path, required=True)
    args = parser.parse_args()
    rows = conversations(pq.read_table(args.samples).to_pylist())
    pq.write_table(pa.Table.from_pylist(rows), args.output_file)
    print(f"{len(rows)} conversations in {args.output_file}")


if __name__ == "__main__":
    main()
