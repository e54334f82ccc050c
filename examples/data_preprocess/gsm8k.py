"""GSM8K (https://arxiv.org/abs/2110.14168), grade-school word problems, as prompts for RL.

    python examples/data_preprocess/gsm8k.py --local_dataset_path folder_with_train_and_test_jsonl
    python examples/data_preprocess/gsm8k.py                       # from the Hugging Face hub

Columns read: question, answer (reasoning, then `#### number`).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from examples.data_preprocess._common import (
    Row,
    add_source,
    load_hub,
    load_splits,
    make_splits,
    parser,
    rl_row,
    run,
    save,
)
from verl.errors import DataError
from verl.utils.reward_score.gsm8k import extract_solution

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and give the final answer after "####".'


def make_row(row: Row, split: str, index: int) -> Row:
    """One problem; the number behind #### is the ground truth."""
    answer = extract_solution(row["answer"])
    if answer is None:
        raise DataError(f"{split} row {index}: the answer has no number after ####: {row['answer']!r:.120}")
    prompt = f"{row['question']} {INSTRUCTION}"
    return rl_row(DATA_SOURCE, prompt, "math", answer, split, index, question=row["question"], answer=row["answer"])


def main() -> None:
    """Read, convert, write."""
    arguments = parser("Make GSM8K prompts for RL.", "~/data/gsm8k")
    add_source(arguments, DATA_SOURCE)
    args = arguments.parse_args()
    loaded = load_splits(args, ("question", "answer"), lambda: load_hub(DATA_SOURCE, "main"))
    save(make_splits(loaded, make_row, args), args.local_save_dir)


if __name__ == "__main__":
    run(main)
