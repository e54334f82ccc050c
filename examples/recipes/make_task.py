"""What the recipes train on, made in a second: a tokenizer of letters, a tiny random Qwen3, and prompts of letters.

The reward (``reward.py``) is 1 for a response with three vowels or more, which random letters have one time in seven.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

import pyarrow as pa
import pyarrow.parquet as pq

from examples.data_preprocess._common import rl_row
from examples.preference.make_task import make_model, make_tokenizer


def main() -> None:
    """Write ``model/``, ``train.parquet`` and ``val.parquet``."""
    parser = argparse.ArgumentParser(description="Tokenizer, model and prompts of the recipes.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/recipes/task"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer, draw = make_tokenizer(), random.Random(args.seed)
    for part in (make_model(tokenizer, args.seed), tokenizer):
        part.save_pretrained(args.output_dir / "model")
    for split, count in (("train", 256), ("val", 32)):
        prompts = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 4))) for _ in range(count)]
        rows = [rl_row("vowels", prompt, "toy", "", split, i) for i, prompt in enumerate(prompts)]
        pq.write_table(pa.Table.from_pylist(rows), args.output_dir / f"{split}.parquet")
    print(f"wrote {args.output_dir}")


if __name__ == "__main__":
    main()
