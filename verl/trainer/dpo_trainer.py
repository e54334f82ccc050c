"""``python -m verl.trainer.dpo_trainer``: direct preference optimisation (DPO).

The trainer is in :mod:`verl.trainer.dpo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base import env
from verl.base.lazy import on_first_use
from verl.config import DPOConfig
from verl.trainer.config.command_line import command
from verl.trainer.driver import driving

if TYPE_CHECKING:
    from verl.trainer.dpo import DPORunner, DPOTrainer

__all__ = ["DPORunner", "DPOTrainer", "main", "run_dpo"]

# `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.
__getattr__ = on_first_use(__name__, dict.fromkeys(["DPORunner", "DPOTrainer"], "verl.trainer.dpo"))


def run_dpo(config: DPOConfig) -> None:
    """Run one DPO training, on Ray or in this process (``trainer.controller``)."""
    from verl.trainer.config.load import load_config
    from verl.trainer.dpo import DPORunner

    config = config if isinstance(config, DPOConfig) else load_config(config, DPOConfig, of_program=True)
    with driving(config):
        DPORunner().run(config)


def main() -> None:
    """Run the command line."""
    if env.rank() > 0:  # under torchrun: rank 0 drives, and starts the other ranks through Ray
        return
    command(run_dpo, config_name="dpo_trainer", root=DPOConfig, restarts=True)()


if __name__ == "__main__":
    main()
