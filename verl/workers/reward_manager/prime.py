"""The reward manager that PRIME's scripts name."""

from __future__ import annotations

from verl.workers.reward_manager.function import Form
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores samples in parallel, each failure by itself (arXiv:2502.01456 uses it for outcome rewards).

    That is what every manager does here, so the name asks for nothing more than per-sample functions.
    The number of processes is ``reward_model.num_workers``. Elsewhere a sample that takes too long or
    raises scores 0 under this manager; here it has a status and is left out of training.
    """

    forms: tuple[Form, ...] = ("sample",)
