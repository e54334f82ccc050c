"""A board in a Ray actor, to which ranks post while they answer a call."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from verl.single_controller.base.board import Board
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.processes import end_workers
from verl.single_controller.ray.watched_actor import START_S

logger = logging.getLogger(__name__)

READ_S = 2.0
"""Time that a reader waits for the actor: a scrape must not hang because a machine does."""


class _BoardActor:
    """Ray runs calls of one caller in their order only if no method is ``async``: the last post must be the newest."""

    def __init__(self) -> None:
        self._values: dict[int, object] = {}

    def post(self, key: int, value: object) -> None:
        self._values[key] = value

    def values(self) -> dict[int, object]:
        return self._values


class RayBoard(Board):
    """See :class:`Board`. Copies that travel to other processes are the same board. Posts do not wait.

    Raises:
        RayError: the actor does not start.
    """

    def __init__(self) -> None:
        self._actor: Any = ray.remote(_BoardActor).options(num_cpus=0).remote()
        ray.get(self._actor.values.remote(), timeout=START_S)
        self._is_silent = False

    def post(self, key: int, value: object) -> None:
        """See :meth:`Board.post`."""
        self._actor.post.remote(key, value)

    def values(self) -> dict[int, object]:
        """See :meth:`Board.values`."""
        try:
            values: dict[int, object] = ray.get(self._actor.values.remote(), timeout=READ_S)
        except RayError as error:
            if not self._is_silent:
                logger.warning("the states of the rollout engines cannot be read: %s", brief(str(error)))
            self._is_silent = True
            return {}
        self._is_silent = False
        return values

    def close(self) -> None:
        """End the actor."""
        if ray.is_initialized():
            end_workers([self._actor])
