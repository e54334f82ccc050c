"""PRIME: a process reward model that is trained in each step on the outcomes alone; see ``prime_algos.py``.

    python examples/recipes/prime/main_prime.py

Beside the policy, the run has a frozen copy of it as reference and a trained copy as reward model. A checkpoint holds
both trained models, ``actor/`` and ``prm/``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # the clone's root

import hydra
from omegaconf import DictConfig, OmegaConf

from examples.recipes.loop import RecipeTrainer
from examples.recipes.prime.prime_algos import ImplicitRewardWorker, process_rewards
from verl import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.workers.fsdp_workers import ActorRolloutRefWorker

PRM_LR = 1e-3
"""Learning rate of the reward model."""
READ = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids")


class PrimeTrainer(RecipeTrainer):
    """Train a policy on outcomes and on the process rewards of a model that learns from the same outcomes."""

    def worker_arguments(self) -> dict[Role, dict[str, Any]]:
        """Two more roles: the reference, and the reward model, configured as a policy with another loss."""
        roles = self.config.actor_rollout_ref
        changes = {
            "optim": {"lr": PRM_LR},
            "policy_loss": {"loss_mode": "implicit_prm"},
            "ppo_mini_batch_size": self.config.data.train_batch_size,
        }
        own = OmegaConf.merge(roles, {"actor": changes})
        model = {"config": own, "role": "actor"}
        reference = {"config": roles, "role": "ref"}
        return {Role.RefPolicy: reference, Role.RewardModel: model, **super().worker_arguments()}

    @property
    def trained_groups(self) -> dict[str, Any]:
        """The reward model is saved and resumed too."""
        return super().trained_groups | {"prm": self.rm_wg}

    def train_step(
        self, prompts: Iterator[DataProto], metrics: dict[str, float], timing: dict[str, float]
    ) -> DataProto:
        """Update the reward model on the outcomes, then the policy on its rewards."""
        batch = self.generate(next(prompts), str(self.global_steps), timing)
        with marked_timer("ref", timing):
            batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        with marked_timer("prm", timing):
            metrics.update(self.update_prm(batch))
            log_prob = self.rm_wg.compute_log_prob(batch.select(batch_keys=READ)).batch["old_log_probs"]
            mask = batch.batch["response_mask"]
            batch.batch["rm_scores"] = process_rewards(log_prob, batch.batch["ref_log_prob"], mask)
        metrics["prm/reward/mean"] = (batch.batch["rm_scores"].sum() / mask.sum()).item()
        return self.learn(batch, metrics, timing)

    def update_prm(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of the reward model on the outcomes of the batch."""
        rows = batch.select(batch_keys=READ, non_tensor_batch_keys=[])
        outcomes = batch.batch["token_level_scores"].sum(-1, keepdim=True)
        rows.batch["advantages"] = outcomes * batch.batch["response_mask"]
        rows.batch["old_log_probs"] = batch.batch["ref_log_prob"]
        found = reduce_metrics(self.rm_wg.update_actor(rows).meta_info["metrics"])
        names = {"actor/pg_loss": "prm/loss", "actor/grad_norm": "prm/grad_norm", "prm/accuracy": "prm/accuracy"}
        return {ours: found[name] for name, ours in names.items()}


class PrimeRunner(TaskRunner):
    """A run with the two further roles, in the processes of the policy."""

    def add_reward_model_worker(self, config: Any) -> None:
        """Add the process reward model."""
        self.role_worker_mapping[Role.RewardModel] = ImplicitRewardWorker
        self.mapping[Role.RewardModel] = "global_pool"

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: type | None = None) -> None:
        """Add the reference, which the process rewards need whatever the KL settings."""
        self.role_worker_mapping[Role.RefPolicy] = ref_policy_cls or ActorRolloutRefWorker
        self.mapping[Role.RefPolicy] = "global_pool"

    def trainer_class(self) -> type[RayPPOTrainer]:
        """See :class:`TaskRunner`."""
        return PrimeTrainer


@hydra.main(config_path="../config", config_name="prime", version_base=None)
def main(config: DictConfig) -> None:
    """Run PRIME with ``config/prime.yaml`` and the settings of the command line."""
    run_ppo(config, task_runner_class=PrimeRunner)


if __name__ == "__main__":
    main()
