"""Public path of the workers of :mod:`verl.workers`."""

from verl.config.prediction import MtpConfig as MtpConfig
from verl.workers.engine_worker import EngineWorker as EngineWorker
from verl.workers.fsdp_workers import ActorRolloutRefWorker as ActorRolloutRefWorker
from verl.workers.fsdp_workers import CriticWorker as CriticWorker
from verl.workers.fsdp_workers import RewardModelWorker as RewardModelWorker
from verl.workers.training_workers import DirectPreferenceWorker as DirectPreferenceWorker
from verl.workers.training_workers import RewardModelTrainingWorker as RewardModelTrainingWorker
from verl.workers.training_workers import TrainingWorker as TrainingWorker
