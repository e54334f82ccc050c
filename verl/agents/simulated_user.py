"""The simulated user of one trajectory: code of an interaction, in a thread of its own and under a limit of time.

user = SimulatedUser.from_row(interactions, row["interaction_kwargs"], 60, LoopThreads())   # None: the row names none
async with user:
    answer = await user.answer(conversation.messages)

What goes wrong with it ends the trajectory with the status ``environment_error``.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from verl.agents.images import read_messages
from verl.agents.loop import TrajectoryError
from verl.agents.user_thread import UserThread
from verl.base.registry import suggest
from verl.base.types import JsonObject
from verl.errors import ConfigError, DataError
from verl.interactions.base import BaseInteraction
from verl.tools.threads import LoopThreads
from verl.vision.messages import without_images
from verl.vision.prompts import ImagePrompts
from verl.workers.reward_manager.scores import UNUSABLE, usable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UserAnswer:
    """The user's answer to a turn of the policy."""

    is_end: bool
    content: str | list[JsonObject]
    """A text, or parts if there are images."""
    score: float | None


class SimulatedUser:
    """The interaction of one trajectory.

    Args:
        interaction: shared by all trajectories of a process.
        kwargs: the row's ``interaction_kwargs``.
        timeout_s: longest time of one call.
        threads: lend the thread.
        images: reads pictures, by the policy's processor; None for a model for text.
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        kwargs: Mapping[str, object],
        timeout_s: float,
        threads: LoopThreads,
        images: ImagePrompts | None = None,
    ) -> None:
        self._images = images
        self._interaction = interaction
        self._kwargs = dict(kwargs)
        self._thread = UserThread(f"the interaction '{kwargs['name']}'", timeout_s, threads)
        self._instance: str | None = None

    @classmethod
    def from_row(
        cls,
        interactions: Mapping[str, BaseInteraction],
        kwargs: object,
        timeout_s: float,
        threads: LoopThreads,
        run_arguments: Mapping[str, object] = MappingProxyType({}),
        images: ImagePrompts | None = None,
    ) -> Self | None:
        """Return the user that a row wants; None if it wants none, or names none and the run has none.

        A row that has arguments and no name gets the only user of the run.

        Args:
            interactions: by name.
            kwargs: the row's ``interaction_kwargs``.
            timeout_s: as for the class.
            threads: as for the class.
            run_arguments: further arguments, the same for all rows; only interactions that ask a judge get them.
            images: as for the class.

        Raises:
            ConfigError: the row's ``interaction_kwargs`` name no interaction that there is.
        """
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigError(f"interaction_kwargs is {kwargs!r:.100}; it is an object with a name, and arguments.")
        arguments = dict(kwargs or {})
        if all(value is None for value in arguments.values()):  # a data set of the user's own may fill keys with None
            return None
        if arguments.get("name") is None and not interactions:  # data for a run with users serve one without, too
            return None
        if arguments.get("name") is None and len(interactions) == 1:
            arguments["name"] = next(iter(interactions))
        name = str(arguments.get("name") or "")
        if name not in interactions:
            available = ", ".join(sorted(interactions))
            there = f"There are: {available}." if available else "There are none."
            raise ConfigError(
                f"interaction_kwargs.name='{name}': there is no such interaction.{suggest(name, list(interactions))} "
                f"{there} The file of actor_rollout_ref.rollout.multi_turn.interaction_config_path lists them."
            )
        more = run_arguments if interactions[name].asks_judge else {}
        return cls(interactions[name], {**arguments, **more}, timeout_s, threads, images)

    async def __aenter__(self) -> Self:
        with ExitStack() as on_failure:
            on_failure.callback(self._thread.leave)
            self._instance = await self._thread.call(self._interaction.start_interaction, None, **self._kwargs)
            on_failure.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        finalize = self._interaction.finalize_interaction
        takes_instance = bool(inspect.signature(finalize).parameters)  # those of earlier releases take nothing
        try:
            await self._thread.call(finalize, *([self._instance] if takes_instance else []))
        except TrajectoryError as error:  # what was said stands
            logger.warning("%s", error)
        finally:
            self._thread.leave()

    async def answer(self, messages: list[JsonObject]) -> UserAnswer:
        """Return the answer to the policy's turn, the last of the messages.

        Raises:
            TrajectoryError: there is none.
        """
        result = await self._thread.call(
            self._interaction.generate_response, self._instance, copy.deepcopy(messages), **self._kwargs
        )
        match result:
            case (is_end, str() | list() as said, score, dict() | None):
                content = "" if is_end else await self._content(said)  # the policy gets no further turn
                try:
                    return UserAnswer(bool(is_end), content, None if score is None else usable(score))
                except UNUSABLE as error:
                    raise self._thread.error(f"gave the score {score!r:.50}, which is no finite number") from error
        raise self._thread.error(
            f"returned {result!r:.100}; generate_response returns (should_terminate, content, score, extra)"
        )

    async def _content(self, answer: str | list[object]) -> str | list[JsonObject]:
        """The content of the user's message."""
        if isinstance(answer, str):
            return answer
        try:
            [message] = await read_messages([{"role": "user", "content": answer}], "generate_response", self._images)
        except (DataError, ConfigError) as error:
            raise self._thread.error(str(error).removesuffix(".")) from error
        if any(image is None for image in without_images([message])[1]):
            raise self._thread.error("generate_response gave an image part that holds no image")
        return message["content"]
