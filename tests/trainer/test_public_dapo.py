"""DAPO as public programs write it, in the calling forms of January 2026 and of v0.8.0: both train to the end, equally.

Ours, in the public style: a trainer that replaces ``fit``, and a task runner that assembles it by the parts of
TaskRunner. At the first pin the trainer is given reward managers and no data sets, at the second data sets and no
reward managers, and the responses come with their scores.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf, open_dict

from tests.support.tiny_run import make_tiny_run, overrides
from verl import DataProto
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward, extract_reward, load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.tracking import Tracking


class DapoTrainer(RayPPOTrainer):
    """Dynamic sampling around the parts of the public trainer."""

    pin: str

    def score(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        """The scores of a batch, as each pin takes them."""
        if self.pin == "january":
            return compute_reward(batch, self.reward_fn)
        if "rm_scores" not in batch.batch:
            batch = batch.union(self._compute_reward_colocate(batch))
        return extract_reward(batch)

    def fit(self):  # noqa: C901 - one function, as public programs have it
        config, n = self.config, self.config.actor_rollout_ref.rollout.n
        logger = Tracking(
            project_name=config.trainer.project_name,
            experiment_name=config.trainer.experiment_name,
            default_backend=config.trainer.logger,
            config=OmegaConf.to_container(config, resolve=True),
        )
        self.global_steps, self.gen_steps = 0, 0
        self._load_checkpoint()
        if self.pin == "v0.8.0":
            self.checkpoint_manager.update_weights(self.global_steps)
        if self.val_reward_fn is not None and config.trainer.get("val_before_train", True):
            logger.log(data=self._validate(), step=self.global_steps)
        if config.actor_rollout_ref.rollout.get("skip_rollout", False):
            RolloutSkip(config, self.actor_rollout_wg).wrap_generate_sequences()
        self.global_steps += 1
        self.gen_steps += 1
        timing_raw, batch, num_prompts, num_gen_batches = defaultdict(float), None, 0, 0
        for _ in range(config.trainer.total_epochs):
            for rows in self.train_dataloader:
                metrics: dict[str, Any] = {}
                new_batch = DataProto.from_single_dict(rows)
                num_gen_batches += 1
                gen_batch = self._get_gen_batch(new_batch)
                gen_output = gen_batch.repeat(repeat_times=n, interleave=True)
                with marked_timer("step", timing_raw):
                    with marked_timer("gen", timing_raw, "red"):
                        gen_output = self.async_rollout_manager.generate_sequences(gen_output)
                        if self.pin == "v0.8.0":
                            self.checkpoint_manager.sleep_replicas()
                        timing_raw.update(gen_output.meta_info["timing"])
                        gen_output.meta_info.pop("timing", None)
                    new_batch.non_tensor_batch["uid"] = np.array(
                        [str(uuid.uuid4()) for _ in range(len(gen_batch))], dtype=object
                    )
                    new_batch = new_batch.repeat(repeat_times=n, interleave=True)
                    new_batch = new_batch.union(gen_output)
                    if "response_mask" not in new_batch.batch:
                        new_batch.batch["response_mask"] = compute_response_mask(new_batch)
                    with marked_timer("reward", timing_raw, "yellow"):
                        reward_tensor, extra = self.score(new_batch)
                        new_batch.batch["token_level_scores"] = reward_tensor
                        new_batch.non_tensor_batch.update({name: np.array(values) for name, values in extra.items()})
                        if config.algorithm.use_kl_in_reward:
                            new_batch, kl = apply_kl_penalty(new_batch, self.kl_ctrl_in_reward)
                            metrics.update(kl)
                        else:
                            new_batch.batch["token_level_rewards"] = new_batch.batch["token_level_scores"]
                    new_batch.non_tensor_batch["seq_reward"] = new_batch.batch["token_level_scores"].sum(-1).numpy()
                    by_prompt = defaultdict(list)
                    names, values = new_batch.non_tensor_batch["uid"], new_batch.non_tensor_batch["seq_reward"]
                    for uid, value in zip(names, values, strict=True):
                        by_prompt[uid].append(value)
                    kept = [uid for uid, seen in by_prompt.items() if np.std(seen) > 0]
                    num_prompts += len(kept)
                    chosen = [row for row, uid in enumerate(new_batch.non_tensor_batch["uid"]) if uid in kept]
                    new_batch = new_batch[chosen]
                    batch = new_batch if batch is None else DataProto.concat([batch, new_batch])
                    if num_prompts < config.data.train_batch_size:
                        assert num_gen_batches < config.algorithm.filter_groups.max_num_gen_batches
                        self.gen_steps += 1
                        continue
                    batch = batch[: config.data.train_batch_size * n]
                    if config.trainer.balance_batch:
                        self._balance_batch(batch, metrics=metrics)
                    batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
                    with marked_timer("old_log_prob", timing_raw, "blue"):
                        old_log_prob, _ = self._compute_old_log_prob(batch)
                        old_log_prob.batch.pop("entropys")
                        batch = batch.union(old_log_prob)
                    if self.use_reference_policy:
                        with marked_timer("ref", timing_raw, "olive"):
                            batch = batch.union(self._compute_ref_log_prob(batch))
                    with marked_timer("adv", timing_raw, "brown"):
                        batch = compute_advantage(
                            batch,
                            adv_estimator=config.algorithm.adv_estimator,
                            gamma=config.algorithm.gamma,
                            lam=config.algorithm.lam,
                            num_repeat=n,
                            norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
                        )
                    with marked_timer("update_actor", timing_raw, "red"):
                        actor_output = self._update_actor(batch)
                    if self.pin == "v0.8.0":
                        with marked_timer("update_weights", timing_raw, "red"):
                            self.checkpoint_manager.update_weights(self.global_steps)
                    metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
                is_last = self.global_steps >= self.total_training_steps
                if config.trainer.test_freq > 0 and (is_last or self.global_steps % config.trainer.test_freq == 0):
                    metrics.update(self._validate())
                if config.trainer.save_freq > 0 and (is_last or self.global_steps % config.trainer.save_freq == 0):
                    self._save_checkpoint()
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
                metrics["train/num_gen_batches"] = num_gen_batches
                timing_raw, batch, num_prompts, num_gen_batches = defaultdict(float), None, 0, 0
                logger.log(data=metrics, step=self.global_steps)
                if is_last:
                    return
                self.global_steps += 1
                self.gen_steps += 1


class DapoTaskRunner(TaskRunner):
    """Assembles the trainer as the program of a pin does."""

    pin: str

    def run(self, config):
        OmegaConf.resolve(config)
        worker_class, group_class = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        if self.pin == "january":
            self.add_reward_model_worker(config)
        else:
            self.add_reward_model_resource_pool(config)
            assert config.reward.reward_model.enable is False
        self.add_ref_policy_worker(config, worker_class)
        validate_config(config, need_reference_policy(config), need_critic(config))
        path = copy_to_local(config.actor_rollout_ref.model.path, use_shm=False)
        tokenizer, processor = hf_tokenizer(path, trust_remote_code=False), hf_processor(path, use_fast=True)
        more: dict[str, Any] = {}
        if self.pin == "january":
            more["reward_fn"] = load_reward_manager(config, tokenizer, num_examine=0)
            more["val_reward_fn"] = load_reward_manager(config, tokenizer, num_examine=1)
            more["train_dataset"] = None
        else:
            data = config.data
            more["train_dataset"] = create_rl_dataset(data.train_files, data, tokenizer, processor, is_train=True)
            more["val_dataset"] = create_rl_dataset(data.val_files, data, tokenizer, processor, is_train=False)
            more["collate_fn"] = collate_fn
            more["train_sampler"] = create_rl_sampler(data, more["train_dataset"])
        trainer = type("Trainer", (DapoTrainer,), {"pin": self.pin})(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=group_class,
            **more,
        )
        trainer.init_workers()
        trainer.fit()


def test_both_pins_train_to_the_end_and_equally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': sum(c.isdigit() for c in solution_str) / 8, 'acc': '1' in solution_str}\n"
    )
    steps: dict[str, dict[int, dict[str, float]]] = {}
    for pin in ("january", "v0.8.0"):
        log = tmp_path / f"{pin}.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        config = compose(
            overrides(
                paths,
                tmp_path,
                custom_reward_function__path=tmp_path / "reward.py",
                trainer__total_training_steps=2,
                trainer__test_freq=2,
                trainer__save_freq=-1,
                trainer__resume_mode="disable",
                algorithm__filter_groups__max_num_gen_batches=4,
                algorithm__filter_groups__metric="seq_reward",
            )
        )
        with open_dict(config):
            config.dapo = {"note": "a section of the program"}
        if pin == "v0.8.0":
            config = migrate_legacy_reward_impl(config)
        run_ppo(config, task_runner_class=type("Runner", (DapoTaskRunner,), {"pin": pin}))
        records = [json.loads(line) for line in log.read_text().splitlines()]
        steps[pin] = {record["step"]: record["data"] for record in records}
    for pin, seen in steps.items():
        assert seen[2]["actor/grad_norm"] > 0, pin
        assert any(name.startswith("val-core/countdown/acc") for name in seen[2]), pin
    same = [name for name in steps["january"][2] if name.startswith(("actor/", "critic/", "val-"))]
    assert len(same) > 20
    assert {name: steps["v0.8.0"][2][name] for name in same} == {name: steps["january"][2][name] for name in same}
