"""GSM8K (https://arxiv.org/abs/2110.14168) as prompts for an agent that may check its answers with a tool.

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path folder_with_train_and_test_jsonl

The rows are those of gsm8k.py, for ``tool_agent`` with the tool of ``examples/agents/gsm8k_tool.yaml``.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from examples.data_preprocess import gsm8k
from examples.data_preprocess._common import Row, add_source, load_hub, load_splits, make_splits, parser, run, save

TOOL = "calc_gsm8k_reward"
INSTRUCTION = f"You may check an answer with the tool {TOOL} before you give it."


def make_row(row: Row, split: str, index: int) -> Row:
    """One problem; the tool knows its ground truth."""
    made = gsm8k.make_row(row, split, index)
    arguments = {TOOL: {"create_kwargs": {"ground_truth": made["reward_model"]["ground_truth"]}}}
    return {
        **made,
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": INSTRUCTION}, *made["prompt"]],
        "extra_info": {**made["extra_info"], "need_tools_kwargs": True, "tools_kwargs": arguments},
    }


def main() -> None:
    """Read, convert, write."""
    arguments = parser("Make GSM8K prompts for an agent with a tool.", "~/data/gsm8k_with_tool")
    add_source(arguments, gsm8k.DATA_SOURCE)
    args = arguments.parse_args()
    loaded = load_splits(args, ("question", "answer"), lambda: load_hub(gsm8k.DATA_SOURCE, "main"))
    save(make_splits(loaded, make_row, args), args.local_save_dir)


if __name__ == "__main__":
    run(main)
