"""``python -m verl.trainer.main_eval``: score stored responses and print the mean score of each data source.

What it does is in :mod:`verl.trainer.evaluation`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use
from verl.config import EvalConfig
from verl.trainer.config.command_line import command

if TYPE_CHECKING:
    from verl.trainer.evaluation import evaluate

__all__ = ["evaluate", "main", "run_eval"]

# `--help` and `--cfg job` answer at once: what needs torch is imported where it is used.
__getattr__ = on_first_use(__name__, {"evaluate": "verl.trainer.evaluation"})


def run_eval(config: EvalConfig) -> None:
    """Score every response of the file, and write the metrics of ``evaluate`` to stdout as JSON, progress to stderr."""
    from verl.trainer.evaluation import score_responses, summarize

    def notify(done: int, total: int) -> None:
        sys.stderr.write(f"{done:,} of {total:,} responses scored\n")

    sys.stdout.write(json.dumps(summarize(score_responses(config, notify)), indent=2) + "\n")


def main() -> None:
    """Run the command line."""
    command(run_eval, config_name="evaluation", root=EvalConfig)()


if __name__ == "__main__":
    main()
