"""The interface of an environment, which answers the policy's actions with observations and rewards."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl.base.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class ImageObservation:
    """Pictures, and a text that stands after them, for a policy that reads images."""

    images: Sequence[object]
    """Each a PIL image, the bytes of a file, a path or a ``data:`` URL."""
    text: str = ""


Observation = str | ImageObservation | list[JsonObject]
"""A text, pictures with a text, or messages as an OpenAI client would write them, which may have parts
``{"type": "image", "image": ...}``."""
Step = tuple[Observation, float | None, bool, bool, Mapping[str, object] | None]


class Environment(ABC):
    """An episode of texts, and of pictures for a policy that reads images.

    Each trajectory makes an object of its own::

        environment = cls(config)
        observation = environment.reset(seed=seed, messages=prompt, **environment_kwargs)
        observation, reward, terminated, truncated, info = environment.step(action)     # after each turn of the policy
        rest = environment.score()
        environment.close()

    Each method may be ``async``. All of them run in one thread of this trajectory, so code that blocks delays no other;
    only after a call that took too long does ``close`` run in another.

    Args:
        config: the environment's ``config`` in the YAML file.
    """

    tools: Sequence[Mapping[str, object]] = ()
    """Descriptions of functions that the policy may call, as an OpenAI client would send them; read after ``reset``."""

    def __init__(self, config: JsonObject) -> None:
        self.config = config

    @classmethod
    def check(cls, config: JsonObject) -> None:
        """Refuse a ``config`` that no episode can be made of, before the run loads a model.

        Raises:
            ConfigError: it is wrong, or a package is missing.
        """
        return

    @abstractmethod
    def reset(
        self, *, seed: int, messages: list[JsonObject], **kwargs: object
    ) -> Observation | Awaitable[Observation | None] | None:
        """Begin the episode.

        Args:
            seed: of the episode's random numbers, in [0, 2^31).
            messages: the row's prompt; images of the row are parts ``{"type": "image"}`` without the picture.
            **kwargs: the row's ``environment_kwargs``.

        Returns:
            A text or an :class:`ImageObservation`, which is added to the row's prompt as the user's; or messages, which
            take the prompt's place, with all image parts of the row or none of them; None if the prompt says it all.
        """

    @abstractmethod
    def step(self, action: str, **kwargs: object) -> Step | Awaitable[Step]:
        """Answer a turn of the policy.

        Args:
            action: its text, without thinking.
            **kwargs: ``tool_calls``, the calls as an OpenAI client would find them, if the environment has ``tools``.

        Returns:
            The observation, a text or pictures of the user (after one call: its result) or messages; the reward of the
            turn, or None from an environment that gives none; whether the episode has come to its end; whether a limit
            of the environment's own ends it; and further values. The observation of the last step is not used.
        """

    def score(self) -> float | Awaitable[float | None] | None:
        """Return a reward of the whole episode, or None; it is added to the reward of the last turn.

        Called once, after the last step, at a limit of turns or of tokens too.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the episode. Called once, also after an error; may be called again."""
        return None


def last_word(text: str, words: Iterable[str]) -> str | None:
    """Return the word (or phrase) of ``words`` that comes last in a text, ignoring case; None if none is there.

    >>> last_word("Not left. I go UP.", ["left", "up"])
    'up'
    """
    by_lower = {word.lower(): word for word in words}
    # The first alternative that matches counts, so the longest comes first: "turn left" is not "left".
    longest_first = sorted(by_lower, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    matches = re.findall(pattern, text.lower())
    return by_lower[matches[-1]] if matches else None
