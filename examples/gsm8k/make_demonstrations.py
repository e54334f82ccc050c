"""Supervised conversations with the interpreter and the user of GSM8K, for the warm-up of a model that makes no calls.

    python examples/gsm8k/make_demonstrations.py --train_file data/gsm8k_agent/train.parquet --output_file sft.parquet

Each has the prompt, one call with a calculation of the data set's own solution, its result, and an answer. Half of the
answers are wrong at first, and right after the user has said so. A model with weights of its own needs none of this.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.interactions.gsm8k_interaction import INCORRECT_REPLY

CALCULATION = re.compile(r"<<([-+*/().\d ]+)=([^>]+)>>")
Message = dict[str, Any]


def demonstration(row: dict[str, Any], number: int) -> list[Message] | None:
    """The conversation of a row; None if its solution calculates nothing."""
    found = CALCULATION.search(row["extra_info"]["answer"])
    if found is None:
        return None
    call = {"name": "python", "arguments": json.dumps({"code": f"print({found[1]})"})}
    truth = row["reward_model"]["ground_truth"]
    wrong = [said(f"#### {found[2]}0"), {"role": "user", "content": INCORRECT_REPLY}]
    return [
        *row["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": found[2]},
        *(wrong if number % 2 else []),
        said(f"#### {truth}"),
    ]


def said(text: str) -> Message:
    """An answer without a call."""
    return {"role": "assistant", "content": text}


def main() -> None:
    """Read the rows of gsm8k_multiturn_w_interaction.py, write conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True, help="parquet of gsm8k_multiturn_w_interaction.py")
    parser.add_argument("--output_file", type=Path, required=True)
    args = parser.parse_args()
    rows = pq.read_table(args.train_file).to_pylist()
    made = [one for number, row in enumerate(rows) if (one := demonstration(row, number)) is not None]
    pq.write_table(pa.Table.from_pylist([{"messages": one} for one in made]), args.output_file)
    print(f"{args.output_file}: {len(made)} conversations of {len(rows)} rows")


if __name__ == "__main__":
    main()
