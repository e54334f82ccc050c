"""``python -m verl.trainer.sft_trainer``: supervised fine-tuning.

The trainer is in :mod:`verl.trainer.sft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config import SFTConfig
from verl.trainer.entry import entry

if TYPE_CHECKING:
    from verl.trainer.sft import SFTRunner, SFTTrainer, to_batch

__all__ = ["SFTRunner", "SFTTrainer", "main", "run_sft", "to_batch"]

run_sft, main, __getattr__ = entry(
    globals(), SFTConfig, "verl.trainer.sft:SFTRunner", ("SFTTrainer", "to_batch"), restarts=True
)


if __name__ == "__main__":
    main()
