"""The name under which scripts know :mod:`verl.trainer.sft_trainer`."""

from verl.trainer.sft_trainer import SFTTrainer, main, run_sft

__all__ = ["SFTTrainer", "main", "run_sft"]

if __name__ == "__main__":
    main()
