"""What a configuration needs, asked as public code asks."""

from __future__ import annotations

import dataclasses

from omegaconf import OmegaConf

from verl.single_controller.base.worker import WorkerType
from verl.trainer.config import PPOConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.roles import Needs, Role, need_reward_model, worker_arguments
from verl.workers.roles import ActorRolloutRefWorker, RewardModelWorker


def test_a_reward_model_is_needed_by_configuration_or_by_role():
    workers: dict[Role, WorkerType] = {Role.ActorRollout: ActorRolloutRefWorker}
    assert not need_reward_model(workers)
    assert need_reward_model({**workers, Role.RewardModel: RewardModelWorker})
    assert need_reward_model(OmegaConf.create({"reward_model": {"enable": True}}))
    assert not need_reward_model(OmegaConf.create({"reward_model": {"enable": False}}))


def test_the_rollout_is_loaded_last():
    """vLLM takes its share of the memory that others left, and refuses to start while they still load."""
    config = load_config(compose(["reward_model.enable=true"]), PPOConfig, with_rules=False, with_algorithms=False)
    everything = Needs(**{field.name: field.name != "judge" for field in dataclasses.fields(Needs)})
    roles = list(worker_arguments(config, everything))
    assert roles == [Role.Critic, Role.RefPolicy, Role.RewardModel, Role.TeacherModel, Role.ActorRollout]


def test_rollout_engines_with_a_pool_keep_their_weights_and_count_its_ranks():
    words = ["actor_rollout_ref.hybrid_engine=false", "trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.nnodes=2"]
    words += ["actor_rollout_ref.rollout.name=native"]
    config = load_config(compose(words), PPOConfig, with_rules=False, with_algorithms=False)
    assert config.actor_rollout_ref.rollout.ranks == 6
    arguments = worker_arguments(config, Needs.from_config(config))
    assert [str(role) for role in arguments] == ["critic", "actor", "rollout"]
    assert config.actor_rollout_ref.rollout.free_cache_engine
    assert not arguments[Role.Rollout]["config"].rollout.free_cache_engine


def test_a_schedule_is_as_long_as_the_run_unless_its_section_says_otherwise():
    words = ["critic.optim.total_training_steps=9"]
    config = load_config(compose(words), PPOConfig, with_rules=False, with_algorithms=False).with_schedules(4)
    assert config.actor_rollout_ref.actor.optim.total_training_steps == 4
    assert config.critic.optim.total_training_steps == 9
