"""The environment of one trajectory: its code runs in a thread of its own and under a limit of time.

async with Episode(entry, template.control.shorten, 60, LoopThreads()) as episode:
    messages, tools = await episode.reset(prompt, seed, arguments)
    answer = await episode.step("left")
    rest = await episode.score()

What goes wrong with it ends the trajectory with the status ``environment_error``.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

from verl.agents.images import read_messages
from verl.agents.loop import TrajectoryError
from verl.agents.user_thread import UserThread
from verl.base.types import JsonMapping, JsonObject
from verl.datasets.chat import Message
from verl.environments.base import Environment, ImageObservation
from verl.environments.registry import EnvironmentEntry
from verl.errors import ConfigError, DataError
from verl.tools.threads import LoopThreads
from verl.vision.messages import texts_of, without_images
from verl.vision.prompts import ImagePrompts
from verl.workers.reward_manager.scores import UNUSABLE, usable

logger = logging.getLogger(__name__)

ROLES = ("user", "tool", "system", "developer", "assistant")
"""Roles of observations; a step returns messages of the first two alone, a reset of all."""
FORM = "step returns (observation, reward, terminated, truncated, info)"
MAX_VALUE_LENGTH = 1000
"""Characters of one further value that are kept."""


@dataclass(frozen=True)
class StepAnswer:
    """An environment's answer to a turn of the policy."""

    messages: list[Message]
    reward: float | None
    terminated: bool
    truncated: bool
    info: JsonObject
    """As values of JSON."""


class Episode:
    """An environment's object, made when the episode is entered and closed when it is left.

    Args:
        entry: which environment.
        shorten: cuts a text to a number of tokens. It must cope with any length.
        timeout_s: longest time of one call.
        threads: lend the thread.
        images: reads pictures, by the policy's processor; None for a model for text.
    """

    def __init__(
        self,
        entry: EnvironmentEntry,
        shorten: Callable[[str, int], str],
        timeout_s: float,
        threads: LoopThreads,
        images: ImagePrompts | None = None,
    ) -> None:
        self._entry = entry
        self._images = images
        self._shorten = shorten
        self._thread = UserThread(f"the environment '{entry.name}'", timeout_s, threads)
        self._environment: Environment | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._environment is not None:
                await self._thread.call(self._environment.close)
        except TrajectoryError as error:  # what was played stands
            logger.warning("%s", error)
        finally:
            self._thread.leave()

    async def reset(
        self, prompt: list[Message], seed: int, arguments: JsonMapping
    ) -> tuple[list[Message], list[JsonObject]]:
        """Make the environment and begin.

        Args:
            prompt: the row's messages.
            seed: of the episode.
            arguments: the row's ``environment_kwargs``.

        Returns:
            The messages that the policy is to answer, and the descriptions of its tools.

        Raises:
            TrajectoryError: the environment failed.
        """
        self._environment = await self._thread.call(self._entry.cls, copy.deepcopy(self._entry.config))
        reset_arguments = {"seed": seed, "messages": copy.deepcopy(prompt), **arguments}
        result = await self._thread.call(self._environment.reset, **reset_arguments)
        result = prompt if result is None else result
        tools = await self._thread.call(_tools, self._environment)
        if not isinstance(result, list):
            [first] = await self._messages([{"role": "user", "content": self._content(result, "reset")}], "reset")
            return _joined(prompt, self._short(first["content"])), tools
        messages = await self._messages(result, "reset")
        missing, images_of_prompt = (without_images(talk)[1].count(None) for talk in (messages, prompt))
        if missing not in (0, images_of_prompt):
            raise self._thread.error(
                f"reset returned {missing} image part(s) that hold no image, and the row has "
                f"{images_of_prompt} image(s); return all of the row's, or none"
            )
        if messages[-1]["role"] == "assistant":
            raise self._thread.error(
                "reset returned messages that end with a turn of the assistant, which is the policy"
            )
        return messages, tools

    async def step(self, action: str, calls: Sequence[JsonMapping] | None = None) -> StepAnswer:
        """Return the answer to a turn of the policy.

        Args:
            action: its text.
            calls: its tool calls, for an environment with tools.

        Raises:
            TrajectoryError: there is none.
        """
        assert self._environment is not None
        more = {} if calls is None else {"tool_calls": copy.deepcopy(list(calls))}
        result = await self._thread.call(self._environment.step, action, **more)
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._thread.error(f"step returned {_shown(result)}; {FORM}")
        observation, reward, terminated, truncated, info = result
        if not isinstance(info, Mapping | None):
            raise self._thread.error(f"step returned info={_shown(info)}, no dict; {FORM}")
        ends = [self._truth(name, value) for name, value in (("terminated", terminated), ("truncated", truncated))]
        # Nobody sees what comes after the end, which many environments leave empty.
        messages = [] if any(ends) else await self._answer(observation, calls or ())
        return StepAnswer(messages, self._number("step", reward), ends[0], ends[1], _plain(info or {}))

    async def score(self) -> float | None:
        """Return the reward of the whole episode, beside those of its steps.

        Raises:
            TrajectoryError: it is no number, or the environment failed.
        """
        assert self._environment is not None
        return self._number("score", await self._thread.call(self._environment.score))

    async def _answer(self, observation: object, calls: Sequence[JsonMapping]) -> list[Message]:
        if not isinstance(observation, list):
            content = self._content(observation, "step")
            if len(calls) > 1:
                raise self._thread.error(
                    f"step answered {len(calls)} tool calls with one text; return a message of the role tool for each"
                )
            observation = [{"role": "tool" if calls else "user", "content": content}]
        messages = await self._messages(observation, "step")
        if any(image is None for image in without_images(messages)[1]):
            raise self._thread.error(
                "step returned an image part that holds no image; give it as {'type': 'image', 'image': ...}"
            )
        return [message | {"content": self._short(message["content"] or "")} for message in messages]

    def _content(self, observation: object, where: str) -> str | list[JsonObject]:
        """The content of a message with an observation that is no list of messages."""
        if isinstance(observation, str):
            return observation
        match observation:
            case ImageObservation(images=list() | tuple() as images, text=str() as text):
                parts = [{"type": "image", "image": image} for image in images]
                return [*parts, {"type": "text", "text": text}] if images else text
            case ImageObservation():
                raise self._thread.error(
                    f"{where} returned an ImageObservation with images={_shown(observation.images)} and "
                    f"text={_shown(observation.text)}; they are a list and a text"
                )
        raise self._unknown(observation, where)

    def _unknown(self, observation: object, where: str) -> TrajectoryError:
        return self._thread.error(
            f"{where} returned the observation {_shown(observation)}; it is a text, an ImageObservation or messages"
        )

    def _short(self, content: str | list[Message]) -> str | list[Message]:
        """A content whose texts have at most ``max_observation_tokens`` each."""
        short = {n: self._shorten(text, self._entry.max_observation_tokens) for n, text in texts_of(content)}
        if isinstance(content, str):
            return short[0]
        return [part | {"text": short[n]} if n in short else part for n, part in enumerate(content)]

    async def _messages(self, value: Sequence[object], where: str) -> list[Message]:
        if not value:
            raise self._unknown(value, where)
        try:
            messages = await read_messages(value, f"the observation of {where}", self._images)
        except (DataError, ConfigError) as error:
            raise self._thread.error(str(error).removesuffix(".")) from error
        allowed = ROLES if where == "reset" else ROLES[:2]
        if invalid := [message["role"] for message in messages if message["role"] not in allowed]:
            raise self._thread.error(f"{where} returned a message of the role {invalid[0]!r:.40}; there are {allowed}")
        return messages

    def _number(self, where: str, reward: object) -> float | None:
        if reward is None:
            return None
        try:
            return usable(float(reward) if isinstance(reward, Real) else reward)
        except UNUSABLE as error:
            raise self._thread.error(f"{where} gave the reward {_shown(reward)}, which is no finite number") from error

    def _truth(self, name: str, value: object) -> bool:
        try:
            return bool(value)
        except UNUSABLE as error:  # an array of several values, for example
            raise self._thread.error(f"step returned {name}={_shown(value)}, neither true nor false") from error


def _tools(environment: Environment) -> list[JsonObject]:
    """Return the descriptions of an environment's tools."""
    return [dict(tool) for tool in environment.tools]


def _joined(prompt: list[Message], observation: str | list[Message]) -> list[Message]:
    """The prompt with an observation as the user's. Many models never met two messages of the user in a row."""
    if not observation:
        return prompt
    last_content = prompt[-1]["content"]
    if prompt[-1]["role"] != "user" or not last_content:
        return [*prompt, {"role": "user", "content": observation}]
    if isinstance(last_content, str) and isinstance(observation, str):
        content: object = f"{last_content}\n\n{observation}"
    else:
        content = [*_parts(last_content), {"type": "text", "text": "\n\n"}, *_parts(observation)]
    return [*prompt[:-1], prompt[-1] | {"content": content}]


def _parts(content: str | list[Message]) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _plain(info: Mapping[Any, object]) -> JsonObject:
    """Further values as values of JSON; those that are none, or are long, by their beginning."""
    plain: JsonObject = {}
    for name, value in info.items():
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = ""
        plain[str(name)] = json.loads(text) if 0 < len(text) <= MAX_VALUE_LENGTH else _shown(value, MAX_VALUE_LENGTH)
    return plain


def _shown(value: object, most: int = 100) -> str:
    return f"{type(value).__name__} {value!r:.{most}}"
