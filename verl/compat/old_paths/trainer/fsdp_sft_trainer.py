"""Alias of :mod:`verl.trainer.sft_trainer`, kept for scripts written for verl releases that used this name."""

from verl.trainer.sft_trainer import SFTTrainer as SFTTrainer
from verl.trainer.sft_trainer import main as main
from verl.trainer.sft_trainer import run_sft as run_sft

if __name__ == "__main__":
    main()
