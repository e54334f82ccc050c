"""Do the mathematical scorers read real text? Each GSM8K solution, ending in its own answer and in another one.

    python -m benchmarks.answer_scorers data/gsm8k/train.parquet data/gsm8k/test.parquet

The answer follows "####", is boxed, follows "The answer is", or stands on an "Answer:" line. The files are made by
``examples/data_preprocess/gsm8k.py``. Prints a table and writes nothing.
"""

from __future__ import annotations

import argparse

import pyarrow.parquet as pq

from verl.scorers import gsm8k, math_dapo, math_reward, prime_math

ENDINGS = {
    "gsm8k": (gsm8k.compute_score, "#### **${}**"),
    "math_reward": (math_reward.compute_score, "So the result is $\\boxed{{{}}}$."),
    "prime_math": (prime_math.compute_score, "The answer is ${}$ in all."),
    "math_dapo": (lambda text, truth: math_dapo.compute_score(text, truth)["acc"], "Answer: {}"),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="parquet files that examples/data_preprocess/gsm8k.py made")
    files = parser.parse_args().files
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
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
