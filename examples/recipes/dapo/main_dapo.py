"""DAPO with a filter loop of its own (https://arxiv.org/abs/2503.14476, section 3.2).

    python examples/recipes/dapo/main_dapo.py

A prompt whose responses all have one score teaches nothing under a group baseline. The step generates for further
prompts until it has a batch of those whose scores differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the clone's root

import hydra
import numpy as np
from omegaconf import DictConfig

from examples.recipes.loop import RecipeTrainer, runner_of
from verl import DataProto
from verl.trainer.main_ppo import run_ppo


def mixed_rows(values: np.ndarray, uids: np.ndarray) -> list[int]:
    """Rows of the prompts whose responses differ in value.

    >>> mixed_rows(np.array([1.0, 1.0, 0.0, 1.0]), np.array(["a", "a", "b", "b"]))
    [2, 3]
    """
    mixed = {uid for uid in set(uids) if len(set(values[uids == uid])) > 1}
    return [row for row, uid in enumerate(uids) if uid in mixed]


class DapoTrainer(RecipeTrainer):
    """Train on prompts whose responses differ."""

    def train_step(
        self, prompts: Iterator[DataProto], metrics: dict[str, float], timing: dict[str, float]
    ) -> DataProto:
        """Generate until enough prompts are mixed; those beyond the batch are dropped."""
        config = self.config.algorithm.filter_groups
        wanted = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        parts: list[DataProto] = []
        drawn = found = 0
        while found < wanted:
            if drawn == (config.max_num_gen_batches or -1):
                raise RuntimeError(f"{drawn} batches gave {found} responses to mixed prompts; a step needs {wanted}.")
            scored = self.generate(next(prompts), f"{self.global_steps}-{drawn}", timing)
            rows = mixed_rows(scored.non_tensor_batch[str(config.metric)], scored.non_tensor_batch["uid"])
            if rows:
                parts.append(scored.select_idxs(rows))
            drawn, found = drawn + 1, found + len(rows)
        metrics["training/filter_groups/num_gen_batches"] = drawn
        return self.learn(DataProto.concat(parts)[:wanted], metrics, timing)


@hydra.main(config_path="../config", config_name="dapo", version_base=None)
def main(config: DictConfig) -> None:
    """Run DAPO with ``config/dapo.yaml`` and the settings of the command line."""
    run_ppo(config, task_runner_class=runner_of(DapoTrainer))


if __name__ == "__main__":
    main()
