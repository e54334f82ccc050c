"""SPPO with a loss of its own (https://arxiv.org/abs/2405.00675): see ``sppo_algos.py``.

    python examples/recipes/sppo/main_sppo.py

Each response plays against the others to its prompt. The policy's log-ratio to the policy that sampled them is fitted
to how often it wins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the clone's root

import hydra
from omegaconf import DictConfig

from examples.recipes.loop import RecipeTrainer, runner_of
from examples.recipes.sppo.sppo_algos import win_rates
from verl import DataProto
from verl.trainer.main_ppo import run_ppo


class SppoTrainer(RecipeTrainer):
    """Train on win rates."""

    def train_step(
        self, prompts: Iterator[DataProto], metrics: dict[str, float], timing: dict[str, float]
    ) -> DataProto:
        """One batch of games."""
        batch = self.generate(next(prompts), str(self.global_steps), timing)
        rates = win_rates(batch.batch["token_level_scores"].sum(-1), batch.non_tensor_batch["uid"])
        metrics["sppo/ties"] = (rates == 0.5).float().mean().item()
        return self.learn(batch, metrics, timing)


@hydra.main(config_path="../config", config_name="sppo", version_base=None)
def main(config: DictConfig) -> None:
    """Run SPPO with ``config/sppo.yaml`` and the settings of the command line."""
    run_ppo(config, task_runner_class=runner_of(SppoTrainer))


if __name__ == "__main__":
    main()
