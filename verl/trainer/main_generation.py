"""``python -m verl.trainer.main_generation``: sample responses to the prompts of a file.

What it does is in :mod:`verl.trainer.generation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config import GenerationConfig
from verl.trainer.entry import entry

if TYPE_CHECKING:
    from verl.trainer.generation import GenerationRunner, write_rows

__all__ = ["GenerationRunner", "main", "run_generation", "write_rows"]

run_generation, main, __getattr__ = entry(
    globals(), GenerationConfig, "verl.trainer.generation:GenerationRunner", ("write_rows",)
)


if __name__ == "__main__":
    main()
