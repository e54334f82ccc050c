"""Three seeds of the quickstart for agents, and their table in Markdown.

python examples/quickstart_agent/study.py --output_dir outputs/quickstart-agent-study
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.quickstart import fresh_folder
from examples.quickstart.study import write_table
from examples.quickstart_agent.quickstart_agent import run_quickstart


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-agent-study"))
    args = parser.parse_args()
    output = fresh_folder(args.output_dir)
    runs = (run_quickstart(seed, fresh_folder(output / f"seed-{seed}")) for seed in args.seeds)
    write_table(runs, output / "table.md")


if __name__ == "__main__":
    main()
