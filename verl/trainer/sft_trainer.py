"""``python -m verl.trainer.sft_trainer``: supervised fine-tuning.

The trainer is in :mod:`verl.trainer.sft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base import env
from verl.base.lazy import on_first_use
from verl.config import SFTConfig
from verl.trainer.config.command_line import command
from verl.trainer.driver import driving

if TYPE_CHECKING:
    from verl.trainer.sft import SFTRunner, SFTTrainer, to_batch

__all__ = ["SFTRunner", "SFTTrainer", "main", "run_sft", "to_batch"]

# `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.
__getattr__ = on_first_use(__name__, dict.fromkeys(["SFTRunner", "SFTTrainer", "to_batch"], "verl.trainer.sft"))


def run_sft(config: SFTConfig) -> None:
    """Run one supervised fine-tuning, on Ray or in this process (``trainer.controller``)."""
    from verl.trainer.config.load import load_config
    from verl.trainer.sft import SFTRunner

    config = config if isinstance(config, SFTConfig) else load_config(config, SFTConfig, of_program=True)
    with driving(config):
        SFTRunner().run(config)


def main() -> None:
    """Run the command line."""
    if env.rank() > 0:  # under torchrun: rank 0 drives, and starts the other ranks through Ray
        return
    command(run_sft, config_name="sft_trainer", root=SFTConfig, restarts=True)()


if __name__ == "__main__":
    main()
