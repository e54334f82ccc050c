"""The same training run by verl and by other frameworks, in turn, on this machine.

    python -m benchmarks.scoreboard                              # all tasks; prints the tables
    python -m benchmarks.scoreboard --write                      # and writes docs/scoreboard.md with its picture
    python -m benchmarks.scoreboard --tasks grpo --seeds 1       # one of them, once

Each framework runs in an environment of its own, by its own command, which is printed before it runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks.scoreboard.peers import PEERS, versions
from benchmarks.scoreboard.results import run_task, table
from benchmarks.scoreboard.tasks import TASKS, Material
from examples.quickstart.quickstart import fresh_folder, positive


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--seeds", type=positive, help="of each task; default: 3, and 1 for smollm2")
    parser.add_argument("--steps", type=positive, help="batches of each run, at least 2, to try the commands")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/scoreboard"))
    parser.add_argument("--environments", type=Path, default=Path("outputs/environments"), help="of the frameworks")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct; default: of its wheel")
    parser.add_argument("--write", action="store_true", help="write docs/scoreboard.md and its picture")
    args = parser.parse_args()
    if args.steps == 1:
        parser.error("--steps 1: the time of a batch is that between the ends of two; at least 2 are needed")
    output = fresh_folder(args.output_dir)
    pythons = {name: PEERS[name].python(args.environments.resolve()) for name in args.peers}
    material = Material(output, args.smollm2 and args.smollm2.expanduser().resolve())
    results = []
    for name in args.tasks:
        result = run_task(TASKS[name], material, pythons, args.seeds, args.steps)
        print(f"\n{TASKS[name].title}\n{table(result)}\n", flush=True)
        results.append(result)
    if args.write:
        from benchmarks.scoreboard.page import write_page  # it needs matplotlib, of the extra "plot"

        command = shlex.join(["python", "-m", "benchmarks.scoreboard", *sys.argv[1:]])
        write_page(results, command, versions(pythons))


if __name__ == "__main__":
    main()
