"""The reward manager for several rewards with an advantage each."""

from __future__ import annotations

from verl.workers.reward_manager.function import Form
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register


@register("gdpo")
class GDPORewardManager(NaiveRewardManager):
    """Scores with a function that returns several rewards, for GDPO (arXiv:2601.05242).

    The function returns ``{"score": ..., "<reward>": number, ...}``; the rewards that
    ``algorithm.gdpo_reward_keys`` names become columns of the batch, each sample with its own, and the
    estimator ``gdpo`` normalises each within its group.
    """

    forms: tuple[Form, ...] = ("sample", "texts")
