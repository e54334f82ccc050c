"""What a configuration needs, asked as public code asks."""

from __future__ import annotations

from omegaconf import OmegaConf

from verl.trainer.ppo.utils import Role, WorkerType, need_reward_model
from verl.workers.roles import ActorRolloutRefWorker, RewardModelWorker


def test_a_reward_model_is_needed_by_configuration_or_by_role():
    workers: dict[Role, WorkerType] = {Role.ActorRollout: ActorRolloutRefWorker}
    assert not need_reward_model(workers)
    assert need_reward_model({**workers, Role.RewardModel: RewardModelWorker})
    assert need_reward_model(OmegaConf.create({"reward_model": {"enable": True}}))
    assert not need_reward_model(OmegaConf.create({"reward_model": {"enable": False}}))
