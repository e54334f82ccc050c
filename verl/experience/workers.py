"""The worker groups that sample and score."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from verl.single_controller.base import WorkerGroup


class ExperienceWorkers(NamedTuple):
    """The worker groups of a run as they are now: groups are replaced when a process is lost."""

    policy: WorkerGroup
    """``generate_sequences``."""
    reward: WorkerGroup | None
    """``compute_rm_score`` of a reward model, or the engines of a judge; None without either."""


CurrentWorkers = Callable[[], ExperienceWorkers]
