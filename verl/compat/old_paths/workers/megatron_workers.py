"""The workers of a run with ``strategy=megatron``: those of :mod:`verl.workers.fsdp_workers`, over another engine."""

from verl.workers.fsdp_workers import ActorRolloutRefWorker as ActorRolloutRefWorker
from verl.workers.fsdp_workers import AsyncActorRolloutRefWorker as AsyncActorRolloutRefWorker
from verl.workers.fsdp_workers import CriticWorker as CriticWorker
from verl.workers.fsdp_workers import RewardModelWorker as RewardModelWorker
