"""A model learns to use a tool that it needs: data, supervised warm-up, GRPO over conversations, and what that changed.

    python examples/quickstart_agent/quickstart_agent.py --seed 1 --output_dir outputs/quickstart-agent

Every stage is a command of its own, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.curves import draw_curves
from examples.quickstart.quickstart import (
    SAMPLES,
    Outcome,
    compare,
    exported_model,
    fresh_folder,
    last_step,
    read_metrics,
    report_accuracy,
    run_stage,
)
from examples.quickstart.settings import command
from examples.quickstart_agent.settings import rl_settings, sft_settings

HERE = Path(__file__).resolve().parent
ACCURACY = "val-core/look_up/reward/mean@1"
RESULT = re.compile("<tool_response>(.*?)</tool_response>")


def conversation_lines(record: dict) -> list[str]:
    """A validation record as lines: each turn of the model, and what the tool said to it."""
    parts = RESULT.split(record["output"])  # the model's and the tool's, by turns
    shown = [f"{'tool ' if number % 2 else 'model'}  {part}" for number, part in enumerate(parts)]
    return [*shown, "right" if record["score"] == 1.0 else f"wrong, it is {record['gts']}"]


def report(outcome: Outcome, pairs: list[tuple[dict, dict]], picture: Path, checkpoint: Path) -> None:
    """What the run changed."""
    report_accuracy(outcome)
    print("\n== Sample conversations")
    for before, after in pairs[:SAMPLES]:
        print(f"   {after['input']}")
        for label, record in (("before", before), ("after", after)):
            for number, line in enumerate(conversation_lines(record)):
                print(f"      {'' if number else label:<8}{line}")
    print(f"\npicture     {picture}\ncheckpoint  {checkpoint}\ntime        {outcome.seconds:.0f} s in all")


def run_quickstart(seed: int, output: Path) -> Outcome:
    """All stages, and their outcome, which is also in ``outcome.json``."""
    started = time.monotonic()
    task, sft, rl = output / "task", output / "sft", output / "grpo"
    for folder in (sft, rl):
        folder.mkdir(parents=True)
    make_task = [sys.executable, str(HERE / "make_task.py"), f"--output_dir={task}", f"--seed={seed}"]
    run_stage("Tokenizer, tiny model, data", make_task, output / "task.log")
    warm_up = command("verl.trainer.sft_trainer", sft_settings(task, sft, seed))
    run_stage("Supervised warm-up", warm_up, sft / "log.txt", sft / "metrics.jsonl")
    model = exported_model(sft / "checkpoints")
    train = command("verl.trainer.main_ppo", rl_settings(task, model, rl, seed))
    run_stage("Reinforcement learning: GRPO with a tool", train, rl / "log.txt", rl / "metrics.jsonl")
    picture = output / "curves.png"
    draw_curves(list(read_metrics(rl / "metrics.jsonl")), ACCURACY, "Two look-ups, GRPO", picture)
    outcome, pairs = compare(rl / "validation", "grpo", seed, time.monotonic() - started)
    (output / "outcome.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    report(outcome, pairs, picture, exported_model(rl / "checkpoints" / f"global_step_{last_step(rl)}" / "actor"))
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
