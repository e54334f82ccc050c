"""``python -m verl.trainer.rm_trainer``: train a reward model on preference pairs with the Bradley-Terry loss.

The trainer is in :mod:`verl.trainer.reward_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base import env
from verl.base.lazy import on_first_use
from verl.config import RMConfig
from verl.trainer.config.command_line import command
from verl.trainer.driver import driving

if TYPE_CHECKING:
    from verl.trainer.reward_model import RMRunner, RMTrainer

__all__ = ["RMRunner", "RMTrainer", "main", "run_rm"]

# `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.
__getattr__ = on_first_use(__name__, dict.fromkeys(["RMRunner", "RMTrainer"], "verl.trainer.reward_model"))


def run_rm(config: RMConfig) -> None:
    """Train one reward model, on Ray or in this process (``trainer.controller``)."""
    from verl.trainer.config.load import load_config
    from verl.trainer.reward_model import RMRunner

    config = config if isinstance(config, RMConfig) else load_config(config, RMConfig, of_program=True)
    with driving(config):
        RMRunner().run(config)


def main() -> None:
    """Run the command line."""
    if env.rank() > 0:  # under torchrun: rank 0 drives, and starts the other ranks through Ray
        return
    command(run_rm, config_name="rm_trainer", root=RMConfig, restarts=True)()


if __name__ == "__main__":
    main()
