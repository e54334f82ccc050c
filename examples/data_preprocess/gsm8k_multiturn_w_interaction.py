"""GSM8K (https://arxiv.org/abs/2110.14168) as prompts for an agent whose user says whether its answer is right.

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_dataset_path folder_of_jsonl

The rows are those of gsm8k.py, for ``tool_agent`` with the user of ``examples/agents/gsm8k_interaction.yaml``. The
tools of ``examples/agents/gsm8k_tool.yaml`` may be used beside it: the user answers turns without a call.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from examples.data_preprocess import gsm8k, gsm8k_multiturn_w_tool
from examples.data_preprocess._common import Row, add_source, load_hub, load_splits, make_splits, parser, run, save

INTERACTION = "gsm8k"


def make_row(row: Row, split: str, index: int) -> Row:
    """One problem; the user, and the tool that checks answers if the run has it, know its ground truth."""
    made = gsm8k_multiturn_w_tool.make_row(row, split, index)
    asks = {"name": INTERACTION, "query": row["question"], "ground_truth": made["reward_model"]["ground_truth"]}
    plain = gsm8k.make_row(row, split, index)["prompt"]  # without the word of the tool, which the run may not have
    return {**made, "prompt": plain, "extra_info": {**made["extra_info"], "interaction_kwargs": asks}}


def main() -> None:
    """Read, convert, write."""
    arguments = parser("Make GSM8K prompts for an agent with a user.", "~/data/gsm8k_with_interaction")
    add_source(arguments, gsm8k.DATA_SOURCE)
    args = arguments.parse_args()
    loaded = load_splits(args, ("question", "answer"), lambda: load_hub(gsm8k.DATA_SOURCE, "main"))
    save(make_splits(loaded, make_row, args), args.local_save_dir)


if __name__ == "__main__":
    run(main)
