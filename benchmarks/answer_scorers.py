"""Do the mathematical scorers read real text? Each GSM8K solution, ending in its own answer and in another one.

    python benchmarks/answer_scorers.py data/gsm8k/train.parquet data/gsm8k/test.parquet

The answer is boxed, follows "The answer is", or stands on an "Answer:" line. The files are made by
``examples/data_preprocess/gsm8k.py``.
"""

from __future__ import annotations

import sys

import pyarrow.parquet as pq

from verl.utils.reward_score import math_dapo, math_reward, prime_math

ENDINGS = {
    "math_reward": (math_reward.compute_score, "So the result is $\\boxed{{{}}}$."),
    "prime_math": (prime_math.compute_score, "The answer is ${}$ in all."),
    "math_dapo": (lambda text, truth: math_dapo.compute_score(text, truth)["acc"], "Answer: {}"),
}


def main() -> None:
    """Print a table."""
    rows = [row for path in sys.argv[1:] for row in pq.read_table(path).to_pylist()]
    print("| scorer | solutions | own answer scores 1 | another number scores 1 |\n|---|---|---|---|")
    for name, (scorer, ending) in ENDINGS.items():
        own = other = 0
        for row in rows:
            reasoning, _, shown = row["extra_info"]["answer"].partition("####")
            truth = row["reward_model"]["ground_truth"]
            own += bool(scorer(f"{reasoning}\n{ending.format(shown.strip())}", truth))
            other += bool(scorer(f"{reasoning}\n{ending.format(int(truth.replace(',', '')) + 1)}", truth))
        print(f"| {name} | {len(rows)} | {own} | {other} |")


if __name__ == "__main__":
    main()
