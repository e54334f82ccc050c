"""Three seeds of the quickstart of distillation, and their table in Markdown.

python examples/quickstart_distill/study.py --output_dir outputs/quickstart-distill-study
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.quickstart import fresh_folder
from examples.quickstart_distill.quickstart_distill import Result, run_distillation, table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-distill-study"))
    args = parser.parse_args()
    output, results = fresh_folder(args.output_dir), list[Result]()
    for seed in args.seeds:
        results += run_distillation(seed, fresh_folder(output / f"seed-{seed}"))
        (output / "table.md").write_text(table(results) + "\n")
    print(f"\n{table(results)}\n\nthe table is also in {output / 'table.md'}")


if __name__ == "__main__":
    main()
