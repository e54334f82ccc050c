"""What the ``fit`` of the three recipes has in common, from the public names of ``RayPPOTrainer`` alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl import DataProto
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.reward import compute_reward
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking


class RecipeTrainer(RayPPOTrainer):
    """Resume, train step by step, validate, log and save; a recipe writes :meth:`train_step`."""

    def fit(self) -> None:
        """Train to ``trainer.total_training_steps``."""
        trainer = self.config.trainer
        settings: Any = OmegaConf.to_container(self.config, resolve=True)
        self._load_checkpoint()
        tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            settings,
            resumed_after=self.global_steps,
        )
        with tracking:
            if trainer.val_before_train and self.global_steps == 0:
                tracking.log(self._validate(), step=0)
            prompts = self.prompts()
            while self.global_steps < self.total_training_steps:
                self.global_steps += 1
                metrics, timing = {}, {}
                with marked_timer("step", timing):
                    batch = self.train_step(prompts, metrics, timing)
                if self.is_due(trainer.test_freq):
                    with marked_timer("testing", timing):
                        metrics.update(self._validate())
                metrics["training/global_step"] = self.global_steps
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing))
                n_gpus = self.resource_pool_manager.get_n_gpus()
                metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=n_gpus))
                tracking.log(metrics, step=self.global_steps)
                if self.is_due(trainer.save_freq):
                    self._save_checkpoint()

    @abstractmethod
    def train_step(
        self, prompts: Iterator[DataProto], metrics: dict[str, float], timing: dict[str, float]
    ) -> DataProto:
        """Take prompts, train on responses to them, and return these with the columns of the step."""

    def is_due(self, frequency: int) -> bool:
        """Whether what happens every ``frequency`` steps, and at the last one, happens now."""
        is_last = self.global_steps == self.total_training_steps
        return frequency > 0 and (is_last or self.global_steps % frequency == 0)

    def prompts(self) -> Iterator[DataProto]:
        """Batches of prompts, epoch after epoch; the loader's position is part of a checkpoint."""
        while True:
            for rows in self.train_dataloader:
                yield DataProto.from_single_dict(rows)

    def generate(self, prompts: DataProto, name: str, timing: dict[str, float]) -> DataProto:
        """Sample n responses to each prompt and score them; ``name`` makes the ids of the prompts unique."""
        n = self.config.actor_rollout_ref.rollout.n
        prompts.non_tensor_batch["uid"] = np.array([f"{name}-{row}" for row in range(len(prompts))], dtype=object)
        with marked_timer("gen", timing):
            gen_batch = self._get_gen_batch(prompts).repeat(repeat_times=n, interleave=True)
            responses = self.async_rollout_manager.generate_sequences(gen_batch)
            batch = prompts.repeat(repeat_times=n, interleave=True).union(responses)
        with marked_timer("reward", timing):
            scores, extra = compute_reward(batch, self.reward_fn)
            batch.batch["token_level_scores"] = scores
            batch.non_tensor_batch.update({key: np.array(values) for key, values in extra.items()})
        return batch

    def learn(self, batch: DataProto, metrics: dict[str, float], timing: dict[str, float]) -> DataProto:
        """Compute log-probs and the advantages of ``algorithm.adv_estimator``, and update the policy."""
        algorithm = self.config.algorithm
        self._balance_batch(batch, metrics=metrics)
        with marked_timer("old_log_prob", timing):
            batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        with marked_timer("adv", timing):
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch = compute_advantage(
                batch,
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
        with marked_timer("update_actor", timing):
            updated = self.actor_rollout_wg.update_actor(batch)
        metrics.update(reduce_metrics(updated.meta_info["metrics"]))
        return batch


def runner_of(trainer: type[RayPPOTrainer]) -> type[TaskRunner]:
    """A task runner with this trainer, for ``run_ppo``."""

    class Runner(TaskRunner):
        def trainer_class(self) -> type[RayPPOTrainer]:
            return trainer

    return Runner
