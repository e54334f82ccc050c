"""``python -m verl.trainer.main_generation``: sample responses to the prompts of a file.

What it does is in :mod:`verl.trainer.generation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use
from verl.config import GenerationConfig
from verl.trainer.config.command_line import command
from verl.trainer.driver import driving

if TYPE_CHECKING:
    from verl.trainer.generation import GenerationRunner, write_rows

__all__ = ["GenerationRunner", "main", "run_generation", "write_rows"]

# `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.
__getattr__ = on_first_use(__name__, dict.fromkeys(["GenerationRunner", "write_rows"], "verl.trainer.generation"))


def run_generation(config: GenerationConfig) -> None:
    """Generate, on Ray or in this process (``trainer.controller``)."""
    from verl.trainer.generation import GenerationRunner

    with driving(config):
        GenerationRunner().run(config)


def main() -> None:
    """Run the command line."""
    command(run_generation, config_name="generation", root=GenerationConfig)()


if __name__ == "__main__":
    main()
