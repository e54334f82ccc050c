"""Three seeds of the quickstart, and their table in Markdown.

python examples/quickstart/study.py --algorithms grpo ppo --output_dir outputs/quickstart-study
python examples/quickstart/study.py --algorithms grpo --steps 40 --settings trainer.async.lag=4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.quickstart import Outcome, fresh_folder, positive, run_quickstart
from examples.quickstart.settings import RL_STEPS, Settings

HEADER = (
    "| algorithm | seed | before | after | gain, points | standard error | prompts gained / lost | seconds |\n"
    "|---|---|---|---|---|---|---|---|"
)


def table(outcomes: list[Outcome]) -> str:
    """One row for each run."""
    rows = [
        f"| {o.algorithm.upper()} | {o.seed} | {100 * o.before:.1f} % | {100 * o.after:.1f} % "
        f"| {100 * (o.after - o.before):+.1f} | {100 * o.standard_error:.1f} | {o.gained} / {o.lost} "
        f"| {o.seconds:.0f} |"
        for o in outcomes
    ]
    return "\n".join([HEADER, *rows])


def write_table(runs: Iterable[Outcome], path: Path) -> None:
    """Write the table anew after each run, and print it at the end."""
    outcomes: list[Outcome] = []
    for outcome in runs:
        outcomes.append(outcome)
        path.write_text(table(outcomes) + "\n")
    print(f"\n{table(outcomes)}\n\nthe table is also in {path}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=["grpo", "ppo"], default=["grpo", "ppo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=positive, default=RL_STEPS, help="of reinforcement learning")
    parser.add_argument("--settings", nargs="+", default=[], metavar="KEY=VALUE", help="changes of main_ppo's settings")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-study"))
    args = parser.parse_args()
    if malformed := [setting for setting in args.settings if "=" not in setting]:
        parser.error(f"--settings {malformed[0]}: write KEY=VALUE, such as trainer.async.lag=4")
    changes: Settings = dict(setting.split("=", 1) for setting in args.settings)
    output = fresh_folder(args.output_dir)
    write_table(
        (
            run_quickstart(algorithm, seed, fresh_folder(output / f"{algorithm}-{seed}"), changes, steps=args.steps)
            for algorithm in args.algorithms
            for seed in args.seeds
        ),
        output / "table.md",
    )


if __name__ == "__main__":
    main()
