"""``python -m verl.trainer.dpo_trainer``: direct preference optimisation (DPO).

The trainer is in :mod:`verl.trainer.dpo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config import DPOConfig
from verl.trainer.entry import entry

if TYPE_CHECKING:
    from verl.trainer.dpo import DPORunner, DPOTrainer

__all__ = ["DPORunner", "DPOTrainer", "main", "run_dpo"]

run_dpo, main, __getattr__ = entry(globals(), DPOConfig, "verl.trainer.dpo:DPORunner", ("DPOTrainer",), restarts=True)


if __name__ == "__main__":
    main()
