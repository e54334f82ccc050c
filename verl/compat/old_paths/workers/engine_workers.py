"""Public path of the workers: :mod:`verl.workers.fsdp_workers` and :mod:`verl.workers.training_workers`."""

from verl.config.prediction import MtpConfig as MtpConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker as ActorRolloutRefWorker
from verl.workers.fsdp_workers import CriticWorker as CriticWorker
from verl.workers.fsdp_workers import RewardModelWorker as RewardModelWorker
from verl.workers.training_workers import DirectPreferenceWorker as DirectPreferenceWorker
from verl.workers.training_workers import EngineWorker as EngineWorker
from verl.workers.training_workers import RewardModelTrainingWorker as RewardModelTrainingWorker
from verl.workers.training_workers import TrainingWorker as TrainingWorker
