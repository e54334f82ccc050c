"""Public path of the workers of a PPO run, :mod:`verl.workers.fsdp_workers`."""

from verl.workers.fsdp_workers import ActorRolloutRefWorker as ActorRolloutRefWorker
from verl.workers.fsdp_workers import CriticWorker as CriticWorker
from verl.workers.fsdp_workers import RewardModelWorker as RewardModelWorker
