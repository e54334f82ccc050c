"""``python -m verl.trainer.rm_trainer``: train a reward model on preference pairs with the Bradley-Terry loss.

The trainer is in :mod:`verl.trainer.reward_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config import RMConfig
from verl.trainer.entry import entry

if TYPE_CHECKING:
    from verl.trainer.reward_model import RMRunner, RMTrainer

__all__ = ["RMRunner", "RMTrainer", "main", "run_rm"]

run_rm, main, __getattr__ = entry(
    globals(), RMConfig, "verl.trainer.reward_model:RMRunner", ("RMTrainer",), restarts=True
)


if __name__ == "__main__":
    main()
