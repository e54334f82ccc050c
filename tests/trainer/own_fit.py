"""A GRPO and PPO step as public recipes write it: a ``fit`` of a subclass, from the public names alone."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from verl import DataProto
from verl.config import PPOConfig
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.trainer.ppo.utils import Role
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig, marked_timer
from verl.utils.tracking import Tracking
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker


def settings_of_features_that_are_missing(config: DictConfig) -> dict[str, Any]:
    """What public fits read on their way, in the forms in which they read it."""
    roles, trainer = config.actor_rollout_ref, config.trainer
    with open_dict(config):
        config.trainer.noted_by_the_fit = True
    plain = OmegaConf.to_container(config, resolve=True)
    return {
        "multi_turn": roles.rollout.multi_turn.enable,
        "agents": roles.rollout.agent.num_workers,
        "skip_rollout": roles.rollout.get("skip_rollout", None),
        "calculate_log_probs": roles.rollout.calculate_log_probs,
        "esi_redundant_time": trainer.esi_redundant_time,
        "wait": trainer["ray_wait_register_center_timeout"],
        "default_hdfs_dir": trainer.default_hdfs_dir,
        "remove_previous_ckpt_in_save": trainer.remove_previous_ckpt_in_save,
        "profile_steps": trainer.profile_steps,
        "profiled": config.global_profiler.steps,
        "use_legacy_worker_impl": trainer.get("use_legacy_worker_impl", "auto"),
        "hybrid_engine": roles.hybrid_engine,
        "lora_rank": roles.model.get("lora_rank", 8),
        "use_shm": OmegaConf.select(config, "actor_rollout_ref.model.use_shm"),
        "trust_remote_code": plain["data"]["trust_remote_code"],
        "use_reward_loop": config.reward_model.use_reward_loop,
        "router_replay": roles.actor.router_replay.mode,
        "num_cpus": config.ray_kwargs.ray_init.num_cpus,
        "lr": plain["actor_rollout_ref"]["actor"]["optim"]["lr"],
        "mini_batch": roles.rollout.log_prob_micro_batch_size_per_gpu,
        "own": trainer.noted_by_the_fit,
        "unknown": (config.get("nothing", 7), "nothing" in trainer),
    }


class OwnFitTrainer(RayPPOTrainer):
    """Prompts are popped, generated, united, rewarded, balanced, updated, validated and saved by hand."""

    found: ClassVar[dict[str, Any]] = {}

    def fit(self) -> None:
        config = self.config
        self.found.update(settings_of_features_that_are_missing(config))
        logger = Tracking(
            config.trainer.project_name,
            config.trainer.experiment_name,
            config.trainer.logger,
            OmegaConf.to_container(config, resolve=True),
        )
        self.global_steps = 0
        self._load_checkpoint()
        self.async_rollout_manager = AgentLoopManager.create(config=config, worker_group=self.actor_rollout_wg)
        if self.val_reward_fn is not None and config.trainer.get("val_before_train", True):
            logger.log(data=self._validate(), step=self.global_steps)
        while self.global_steps < self.total_training_steps:
            for rows in self.train_dataloader:
                self.global_steps += 1
                metrics = self.one_step(rows)
                is_last = self.global_steps >= self.total_training_steps
                if config.trainer.test_freq > 0 and (is_last or self.global_steps % config.trainer.test_freq == 0):
                    metrics.update(self._validate())
                if config.trainer.save_freq > 0 and (is_last or self.global_steps % config.trainer.save_freq == 0):
                    self._save_checkpoint()
                logger.log(data=metrics, step=self.global_steps)
                if is_last:
                    logger.finish()
                    return

    def prompts_of(self, batch: DataProto) -> DataProto:
        """What to generate from."""
        return self._get_gen_batch(batch)

    def one_step(self, rows: dict[str, Any]) -> dict[str, float]:
        """The metrics of a step."""
        do_profile = self.global_steps == 2
        self._start_profiling(do_profile)
        metrics = self.own_step(rows)
        self._stop_profiling(do_profile)
        return metrics

    def own_step(self, rows: dict[str, Any]) -> dict[str, float]:
        """Sample, score, learn."""
        metrics, timing_raw = {}, {}
        n = self.config.actor_rollout_ref.rollout.n
        algorithm, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        with marked_timer("step", timing_raw):
            batch = DataProto.from_single_dict(rows)
            batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch.batch))], dtype=object)
            gen_batch = self.prompts_of(batch)
            gen_batch.meta_info["global_steps"] = self.global_steps
            gen_batch = gen_batch.repeat(repeat_times=n, interleave=True)
            with marked_timer("gen", timing_raw, color="red"):
                generator = self.async_rollout_manager if self.async_rollout_mode else self.actor_rollout_wg
                gen_batch_output = generator.generate_sequences(gen_batch)
                timing_raw.update(gen_batch_output.meta_info["timing"])
                gen_batch_output.meta_info.pop("timing", None)
            batch = batch.repeat(repeat_times=n, interleave=True)
            batch = batch.union(gen_batch_output)
            if "response_mask" not in batch.batch.keys():
                batch.batch["response_mask"] = compute_response_mask(batch)
            if self.config.trainer.balance_batch:
                self._balance_batch(batch, metrics=metrics)
            batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
            with marked_timer("reward", timing_raw, color="yellow"):
                if self.use_rm:
                    batch = batch.union(self.rm_wg.compute_rm_score(batch))
                reward_tensor, reward_extra_infos_dict = compute_reward(batch, self.reward_fn)
            with marked_timer("old_log_prob", timing_raw, color="blue"):
                old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
                entropys = old_log_prob.batch["entropys"]
                entropy = agg_loss(entropys, batch.batch["response_mask"], actor.loss_agg_mode)
                metrics["actor/entropy"] = entropy.detach().item()
                old_log_prob.batch.pop("entropys")
                batch = batch.union(old_log_prob)
            if self.use_reference_policy:
                with marked_timer("ref", timing_raw, color="olive"):
                    workers = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
                    batch = batch.union(workers.compute_ref_log_prob(batch))
            if self.use_critic:
                with marked_timer("values", timing_raw, color="cyan"):
                    batch = batch.union(self.critic_wg.compute_values(batch))
            with marked_timer("adv", timing_raw, color="brown"):
                batch.batch["token_level_scores"] = reward_tensor
                batch.non_tensor_batch.update({k: np.array(v) for k, v in reward_extra_infos_dict.items()})
                if algorithm.use_kl_in_reward:
                    batch, kl_metrics = apply_kl_penalty(
                        batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty
                    )
                    metrics.update(kl_metrics)
                else:
                    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
                batch = compute_advantage(
                    batch,
                    adv_estimator=algorithm.adv_estimator,
                    gamma=algorithm.gamma,
                    lam=algorithm.lam,
                    num_repeat=n,
                    norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
                    config=algorithm,
                )
            if self.use_critic:
                with marked_timer("update_critic", timing_raw, color="pink"):
                    critic_output = self.critic_wg.update_critic(batch)
                metrics.update(reduce_metrics(critic_output.meta_info["metrics"]))
            if self.config.trainer.critic_warmup < self.global_steps:
                with marked_timer("update_actor", timing_raw, color="red"):
                    actor_output = self.actor_rollout_wg.update_actor(batch)
                metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
            if folder := self.config.trainer.get("rollout_data_dir", None):
                self._log_rollout_data(batch, reward_extra_infos_dict, timing_raw, folder)
        metrics["training/global_step"] = self.global_steps
        metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
        metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
        n_gpus = self.resource_pool_manager.get_n_gpus()
        metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus))
        return metrics


class ProfiledWorker(ActorRolloutRefWorker, DistProfilerExtension):
    """A worker of policy and rollout with a profiler; the trainer says when it records."""

    def __init__(self, config: DictConfig, role: str, **kwargs: Any) -> None:
        ActorRolloutRefWorker.__init__(self, config, role, **kwargs)
        folder = Path(os.environ["VERL_FILE_LOGGER_PATH"]).with_suffix("") / "profile"
        settings = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(folder))
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank, config=settings))


class OwnFitRunner(TaskRunner):
    """A run with that trainer."""

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[type, type]:
        _, group_class = super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = ProfiledWorker
        return ProfiledWorker, group_class

    def trainer_class(self) -> type[RayPPOTrainer]:
        return OwnFitTrainer


class OwnWorkersTrainer(OwnFitTrainer):
    """It also starts the workers by hand, one process for all of them on each rank; prompts go without their ids."""

    def prompts_of(self, batch: DataProto) -> DataProto:
        return batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])

    def init_workers(self) -> None:
        self.resource_pool_manager.create_resource_pool()
        pools = self.resource_pool_manager.resource_pool_dict.values()
        self.resource_pool_to_cls = {pool: {} for pool in pools}
        roles = {
            Role.ActorRollout: {"config": self.config.actor_rollout_ref, "role": "actor_rollout"},
            Role.Critic: {"config": self.config.critic},
            Role.RefPolicy: {"config": self.config.actor_rollout_ref, "role": "ref"},
            Role.RewardModel: {"config": self.config.reward_model},
        }
        for role, arguments in roles.items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            worker = RayClassWithInitArgs(cls=self.role_worker_mapping[role], **arguments)
            self.resource_pool_to_cls[pool][str(role)] = worker
        all_wg = {}
        for pool, classes in self.resource_pool_to_cls.items():
            group = self.ray_worker_group_cls(
                resource_pool=pool,
                ray_cls_with_init=create_colocated_worker_cls(class_dict=classes),
                device_name=self.device_name,
            )
            all_wg.update(group.spawn(prefix_set=classes.keys()))
        self.critic_wg = all_wg[str(Role.Critic)]
        self.critic_wg.init_model()
        self.ref_policy_wg = all_wg[str(Role.RefPolicy)]
        self.ref_policy_wg.init_model()
        self.rm_wg = all_wg[str(Role.RewardModel)]
        self.rm_wg.init_model()
        self.actor_rollout_wg = all_wg[str(Role.ActorRollout)]
        self.actor_rollout_wg.init_model()


@ray.remote(num_cpus=1)
class OwnRunner:
    """A run as a ``main_*.py`` assembles it, without any class of verl's."""

    def run(self, config: DictConfig) -> None:
        OmegaConf.resolve(config)
        path = copy_to_local(config.actor_rollout_ref.model.path)
        tokenizer = hf_tokenizer(path, trust_remote_code=config.data.get("trust_remote_code", False))
        role_worker_mapping = {
            Role.ActorRollout: ray.remote(ActorRolloutRefWorker),
            Role.Critic: ray.remote(CriticWorker),
            Role.RefPolicy: ray.remote(ActorRolloutRefWorker),
            Role.RewardModel: ray.remote(RewardModelWorker),
        }
        pools = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
        reward_kwargs = config.reward_model.get("reward_kwargs", {})
        trainer = OwnWorkersTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=hf_processor(path, use_fast=True),
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=ResourcePoolManager(
                resource_pool_spec=pools, mapping=dict.fromkeys(role_worker_mapping, "global_pool")
            ),
            ray_worker_group_cls=RayWorkerGroup,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs),
            train_dataset=dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, dataset),
            device_name=config.trainer.device,
        )
        trainer.init_workers()
        trainer.fit()
        trainer.shutdown()
