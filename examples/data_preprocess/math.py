r"""MATH (https://arxiv.org/abs/2103.03874), competition problems, as prompts for RL.

    python examples/data_preprocess/math.py --local_dataset_path folder_with_train_and_test_jsonl
    python examples/data_preprocess/math.py                        # from the Hugging Face hub

Columns read: problem, solution (with the answer in \boxed{...}).
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
from verl.utils.reward_score.math_reward import last_boxed

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


def make_row(row: Row, split: str, index: int) -> Row:
    """One problem; what the solution's last box holds is the ground truth."""
    answer = last_boxed(row["solution"])
    if answer is None:
        raise DataError(f"{split} row {index}: the solution has no \\boxed{{...}}: {row['solution']!r:.120}")
    prompt = f"{row['problem']} {INSTRUCTION}"
    about = {name: row[name] for name in ("level", "type") if row.get(name) is not None}
    return rl_row(
        DATA_SOURCE, prompt, "math", answer, split, index, question=row["problem"], answer=row["solution"], **about
    )


def main() -> None:
    """Read, convert, write."""
    arguments = parser("Make MATH prompts for RL.", "~/data/math")
    add_source(arguments, DATA_SOURCE)
    args = arguments.parse_args()
    loaded = load_splits(args, ("problem", "solution"), lambda: load_hub(DATA_SOURCE))
    save(make_splits(loaded, make_row, args), args.local_save_dir)


if __name__ == "__main__":
    run(main)
