"""The simulated user of one trajectory: code of an interaction, in a thread of its own and under a limit of time.

user = SimulatedUser.of_row(interactions, row["interaction_kwargs"], timeout_s=60)     # None where the row names none
async with user:
    answer = await user.answer(conversation.messages)

What goes wrong with it ends the trajectory with the status ``environment_error``.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from verl.agents.loop import TrajectoryError
from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.tools.threads import LoopThread
from verl.workers.reward_manager.scores import UNUSABLE, usable

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class UserAnswer:
    """What the user says to a turn of the policy."""

    is_end: bool
    text: str
    score: float | None


class SimulatedUser:
    """The interaction of one trajectory.

    Args:
        interaction: shared by all trajectories of a process.
        kwargs: the row's ``interaction_kwargs``.
        timeout_s: longest time of one call.
    """

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        self._interaction = interaction
        self._kwargs = dict(kwargs)
        self._timeout_s = timeout_s
        self._thread: LoopThread | None = None
        self._instance: str | None = None

    @classmethod
    def of_row(cls, interactions: Mapping[str, BaseInteraction], kwargs: Any, timeout_s: float) -> Self | None:
        """Return the user that a row wants; None if it wants none.

        Raises:
            ConfigError: the row's ``interaction_kwargs`` name no interaction that there is.
        """
        # Files in columns give a row the keys of others, with null.
        given = {key: value for key, value in dict(kwargs or {}).items() if value is not None}
        if not given:
            return None
        name = str(given.get("name", ""))
        if name not in interactions:
            known = ", ".join(sorted(interactions))
            there = f"There are: {known}." if known else "There are none."
            raise ConfigError(
                f"interaction_kwargs.name='{name}': there is no such interaction.{suggest(name, list(interactions))} "
                f"{there} The file of actor_rollout_ref.rollout.multi_turn.interaction_config_path lists them."
            )
        return cls(interactions[name], given, timeout_s)

    async def __aenter__(self) -> Self:
        with ExitStack() as on_failure:
            on_failure.callback(self._leave_thread)
            self._instance = await self._run(self._interaction.start_interaction, None, **self._kwargs)
            on_failure.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        finalize = self._interaction.finalize_interaction
        takes_instance = bool(inspect.signature(finalize).parameters)  # those of earlier releases take nothing
        try:
            await self._run(finalize, *([self._instance] if takes_instance else []))
        except TrajectoryError as error:  # what was said stands
            logger.warning("%s", error)
        finally:
            self._leave_thread()

    async def answer(self, messages: list[dict[str, Any]]) -> UserAnswer:
        """Return the answer to the policy's turn, the last of the messages.

        Raises:
            TrajectoryError: there is none.
        """
        found = await self._run(
            self._interaction.generate_response, self._instance, copy.deepcopy(messages), **self._kwargs
        )
        match found:
            case (is_end, str() as text, score, dict() | None):
                try:
                    return UserAnswer(bool(is_end), text, None if score is None else usable(score))
                except UNUSABLE as error:
                    raise self._error(f"gave the score {score!r:.50}, which is no finite number") from error
        raise self._error(
            f"returned {found!r:.100}; generate_response returns (should_terminate, content, score, extra)"
        )

    async def _run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        """Run code of the interaction in its thread, for at most the time of a call."""
        self._thread = self._thread or LoopThread("simulated user of a trajectory")
        future = self._thread.submit(_called(function, *args, **kwargs))
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not this trajectory was cancelled, but the interaction's code
                raise self._error(f"{function.__name__} was cancelled by its own code") from error
            self._leave_thread()
            raise
        except Exception as error:  # users' code raises anything
            if isinstance(error, TimeoutError) and limit.expired():
                self._leave_thread()
                message = f"{function.__name__} took longer than tool_timeout_s={self._timeout_s:g} s"
                raise self._error(message) from None
            raise self._error(f"{function.__name__} failed: {type(error).__name__}: {error}") from error

    def _leave_thread(self) -> None:
        """End the thread; if code blocks it, it ends when that returns. What follows gets another."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _error(self, message: str) -> TrajectoryError:
        return TrajectoryError(f"the interaction '{self._kwargs['name']}': {message}.", "environment_error")


async def _called(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
    """Call and await code of an interaction; turn ``sys.exit`` into an error, which would end the event loop."""
    try:
        return await function(*args, **kwargs)
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from error
