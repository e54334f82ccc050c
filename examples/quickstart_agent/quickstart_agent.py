"""A model learns to use a tool that it needs: data, supervised warm-up, GRPO over conversations, and what that changed.

    python examples/quickstart_agent/quickstart_agent.py --seed 1 --output_dir outputs/quickstart-agent

Every stage is a command of its own, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.quickstart import (
    SAMPLES,
    Outcome,
    fresh_folder,
    report_accuracy,
    report_files,
    run_stages,
)
from examples.quickstart_agent.settings import rl_settings, sft_settings

HERE = Path(__file__).resolve().parent
ACCURACY = "val-core/look_up/reward/mean@1"
RESULT = re.compile("<tool_response>(.*?)</tool_response>")


def conversation_lines(record: dict) -> list[str]:
    """A validation record as lines: each turn of the model, and what the tool said to it."""
    parts = RESULT.split(record["output"])  # the model's and the tool's, by turns
    shown = [f"{'tool ' if number % 2 else 'model'}  {part}" for number, part in enumerate(parts)]
    return [*shown, "right" if record["score"] == 1.0 else f"wrong, it is {record['gts']}"]


def report_conversations(pairs: list[tuple[dict, dict]]) -> None:
    """Some conversations before and after."""
    print("\n== Sample conversations")
    for before, after in pairs[:SAMPLES]:
        print(f"   {after['input']}")
        for label, record in (("before", before), ("after", after)):
            for number, line in enumerate(conversation_lines(record)):
                print(f"      {'' if number else label:<8}{line}")


def run_quickstart(seed: int, output: Path) -> Outcome:
    """All stages, and their outcome, which is also in ``outcome.json``."""
    curves = ("Two look-ups, GRPO", ACCURACY)
    outcome, pairs = run_stages("grpo", seed, output, HERE / "make_task.py", sft_settings, rl_settings, curves)
    report_accuracy(outcome)
    report_conversations(pairs)
    report_files(output, outcome)
    return outcome


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of data, weights and sampling")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-agent"))
    args = parser.parse_args()
    run_quickstart(args.seed, fresh_folder(args.output_dir))


if __name__ == "__main__":
    main()
