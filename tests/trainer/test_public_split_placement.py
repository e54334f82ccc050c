"""Actor and critic on pools of their own that learn at the same time, as public programs write it: a ``fit`` in place
of the trainer's, workers whose updates do not block, two pools on Ray. The numbers are those of verl's own step.

Ours, in the public style.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from omegaconf import DictConfig, OmegaConf

from tests.support.tiny_run import make_tiny_run, overrides, same
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

STEPS = 2


class SplitActor(ActorRolloutRefWorker):
    """Its update returns at once."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def update_actor(self, data: DataProto):
        return super().update_actor(data)


class SplitCritic(CriticWorker):
    """Its update returns at once."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), blocking=False)
    def update_critic(self, data: DataProto):
        return super().update_critic(data)


class LateActor(SplitActor):
    """Neither do its log-probs block."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def compute_log_prob(self, data: DataProto):
        return super().compute_log_prob(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"), blocking=False)
    def compute_ref_log_prob(self, data: DataProto):
        return super().compute_ref_log_prob(data)


class LateCritic(SplitCritic):
    """Neither do its values block."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), blocking=False)
    def compute_values(self, data: DataProto):
        return super().compute_values(data)


def split_fit(self: Any) -> None:
    """Take the place of the trainer's ``fit``: the critic's update is under way when the actor's begins."""
    config, n = self.config, self.config.actor_rollout_ref.rollout.n
    logger = Tracking(
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        default_backend=config.trainer.logger,
        config=OmegaConf.to_container(config, resolve=True),
    )
    self.global_steps = 0
    self._load_checkpoint()
    self.global_steps += 1
    for _ in range(config.trainer.total_epochs):
        for batch_dict in self.train_dataloader:
            metrics: dict[str, Any] = {}
            timing_raw: dict[str, float] = {}
            batch = DataProto.from_single_dict(batch_dict)
            gen_batch = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
            gen_batch = gen_batch.repeat(repeat_times=n, interleave=True)
            is_last_step = self.global_steps >= self.total_training_steps
            with marked_timer("step", timing_raw):
                with marked_timer("gen", timing_raw):
                    gen_batch_output = self.actor_rollout_wg.generate_sequences(gen_batch)
                batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
                batch = batch.repeat(repeat_times=n, interleave=True)
                batch = batch.union(gen_batch_output)
                self._balance_batch(batch, metrics=metrics)
                batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
                with marked_timer("old_log_prob", timing_raw):
                    old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
                    batch = batch.union(old_log_prob)
                if self.use_reference_policy:
                    with marked_timer("ref", timing_raw):
                        batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
                if self.use_critic:
                    with marked_timer("values", timing_raw):
                        batch = batch.union(self.critic_wg.compute_values(batch))
                with marked_timer("adv", timing_raw):
                    batch.batch["token_level_scores"] = self.reward_fn(batch)
                    batch, kl_metrics = apply_kl_penalty(
                        batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=config.algorithm.kl_penalty
                    )
                    metrics.update(kl_metrics)
                    batch = compute_advantage(
                        batch,
                        adv_estimator=config.algorithm.adv_estimator,
                        gamma=config.algorithm.gamma,
                        lam=config.algorithm.lam,
                        num_repeat=n,
                    )
                with marked_timer("update_critic_call", timing_raw):
                    critic_output = self.critic_wg.update_critic(batch)
                with marked_timer("update_actor_call", timing_raw):
                    actor_output = self.actor_rollout_wg.update_actor(batch)
                assert isinstance(critic_output, DataProtoFuture)
                assert isinstance(actor_output, DataProtoFuture)
                with marked_timer("update_actor_critic", timing_raw):
                    metrics.update(reduce_metrics(critic_output.get().meta_info["metrics"]))
                    metrics.update(reduce_metrics(actor_output.get().meta_info["metrics"]))
                if config.trainer.save_freq > 0 and (is_last_step or self.global_steps % config.trainer.save_freq == 0):
                    self._save_checkpoint()
            metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
            metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
            n_gpus = self.resource_pool_manager.get_n_gpus()
            metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus))
            logger.log(data=metrics, step=self.global_steps)
            if is_last_step:
                return
            self.global_steps += 1


def main_task(config: DictConfig) -> None:
    """Assemble the run: half of the ranks for actor, rollout and reference, the other half for the critic."""
    OmegaConf.resolve(config)
    tokenizer = hf_tokenizer(copy_to_local(config.actor_rollout_ref.model.path))
    role_worker_mapping = {
        Role.ActorRollout: ray.remote(SplitActor),
        Role.Critic: ray.remote(SplitCritic),
        Role.RefPolicy: ray.remote(SplitActor),
    }
    half = config.trainer.n_gpus_per_node // 2
    resource_pool_spec = {
        "actor_rollout_ref_pool": [half] * config.trainer.nnodes,
        "critic_pool": [half] * config.trainer.nnodes,
    }
    mapping = {
        Role.ActorRollout: "actor_rollout_ref_pool",
        Role.Critic: "critic_pool",
        Role.RefPolicy: "actor_rollout_ref_pool",
    }
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping),
        ray_worker_group_cls=RayWorkerGroup,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
        device_name=config.trainer.device,
    )
    trainer.init_workers()
    trainer.fit()
    trainer.shutdown()


class SplitRunner:
    """What ``run_ppo`` runs."""

    def run(self, config: DictConfig) -> None:
        main_task(config)


class LateRunner(TaskRunner):
    """verl's own step with workers none of whose calls block."""

    def init_resource_pool_mgr(self, config: Any) -> Any:
        late = {Role.ActorRollout: LateActor, Role.Critic: LateCritic, Role.RefPolicy: LateActor}
        self.role_worker_mapping.update(late)
        return super().init_resource_pool_mgr(config)


@pytest.mark.slow
def test_two_pools_that_learn_at_the_same_time_make_the_numbers_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    own_fit = RayPPOTrainer.fit
    steps: dict[str, dict[int, dict[str, float]]] = {}
    files: dict[str, dict[str, Any]] = {}
    for name, runner, fit, ranks in [
        ("split", SplitRunner, split_fit, 2),
        ("one pool", TaskRunner, own_fit, 1),
        ("late", LateRunner, own_fit, 1),
    ]:
        log, folder = tmp_path / f"{name}.jsonl", tmp_path / name
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        monkeypatch.setattr(RayPPOTrainer, "fit", fit)
        config = compose(
            overrides(
                paths,
                folder,
                algorithm__adv_estimator="gae",
                algorithm__use_kl_in_reward="true",
                custom_reward_function__path=tmp_path / "reward.py",
                trainer__controller="ray",
                trainer__n_gpus_per_node=ranks,
                trainer__total_training_steps=STEPS,
                trainer__save_freq=STEPS,
            )
        )
        run_ppo(config, runner)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        steps[name] = {record["step"]: record["data"] for record in records}
        last = folder / "checkpoints" / f"global_step_{STEPS}"
        saved = [*last.glob("*/model_*.pt"), *last.glob("*/optim_*.pt")]
        files[name] = {str(path.relative_to(last)): torch.load(path, weights_only=True) for path in saved}
    for name in ("split", "late"):
        assert list(steps[name]) == list(steps["one pool"]) == [1, 2]
        for step, metrics in steps[name].items():
            compared = [m for m in metrics if m.startswith(("actor/", "critic/", "response_length/"))]
            assert {"actor/grad_norm", "actor/reward_kl_penalty", "critic/vf_loss", "critic/score/mean"} <= {*compared}
            assert {m: metrics[m] for m in compared} == {m: steps["one pool"][step][m] for m in compared}
        assert len(files[name]) == 4  # weights and moments of actor and critic
        assert same(files[name], files["one pool"])
