"""Public path of a manager in :mod:`verl.workers.reward_manager`, and of scoring beside a run."""

from verl.compat.toolkit.scoring import parallel_compute_score_async as parallel_compute_score_async
from verl.workers.reward_manager import PrimeRewardManager as PrimeRewardManager
