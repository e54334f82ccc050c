"""Environments of gymnasium whose observations and actions are texts."""

from __future__ import annotations

from typing import Any

from PIL import Image

from verl.base.requirements import install_command
from verl.base.types import JsonMapping, JsonObject
from verl.environments.base import Environment, ImageObservation, last_word
from verl.errors import ConfigError

KEYS = ("env_id", "kwargs", "actions", "invalid_reward")


class GymnasiumEnvironment(Environment):
    """An environment of ``gymnasium.make``.

    ``config`` has

    - ``env_id``: as ``gymnasium.make`` takes it (``module:Name-v0`` imports the module first), and its ``kwargs``;
    - ``actions``: for a Discrete action space, a word for each action, in order; the action is the last of these words
      in the policy's turn. A Text action space takes the whole turn, without blanks around it;
    - ``invalid_reward``: reward of a turn that holds no action (0). The environment makes no step then; the policy is
      told what actions there are.

    Observations of a Text space are shown as they are. For another space give ``kwargs: {render_mode: ansi}``: then the
    environment's own text rendering is the observation. With ``render_mode: rgb_array`` its picture is shown, to a
    policy that reads images, with the text of a Text space. ``environment_kwargs`` of a row are ``options`` of
    ``reset``.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self._env = _make_env(config)
        self._actions: list[str] = list(config.get("actions") or ())
        self._is_text = _is_text(self._env.observation_space)

    @classmethod
    def check(cls, config: JsonObject) -> None:
        """See :meth:`verl.environments.base.Environment.check`."""
        if unknown := sorted(set(config) - set(KEYS)):
            raise ConfigError(f"unknown: {', '.join(unknown)}. Known: {', '.join(KEYS)}.")
        env = _make_env(config)
        try:
            _check_spaces(env, config)
        finally:
            env.close()

    def reset(self, *, seed: int, messages: list[JsonObject], **kwargs: object) -> str | ImageObservation:
        """Begin an episode."""
        observation, _ = self._env.reset(seed=seed, options=kwargs or None)
        return self._observation_of(observation)

    def step(self, action: str, **kwargs: object) -> tuple[str | ImageObservation, float, bool, bool, JsonMapping]:
        """Take the action that the text names."""
        value = self._value(action)
        if value is None:
            said = (
                f"There is no action in that. Answer one of: {', '.join(self._actions)}."
                if self._actions
                else (f"That is no action of {self._env.action_space}.")
            )
            return said, self.config.get("invalid_reward", 0.0), False, False, {"is_invalid": True}
        observation, reward, terminated, truncated, info = self._env.step(value)
        return self._observation_of(observation), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _value(self, action: str) -> object:
        if not self._actions:
            text = action.strip()
            return text if self._env.action_space.contains(text) else None
        word = last_word(action, self._actions)
        return None if word is None else int(self._env.action_space.start) + self._actions.index(word)

    def _observation_of(self, observation: Any) -> str | ImageObservation:
        text = observation if self._is_text else ""
        if self._env.render_mode == "rgb_array":
            return ImageObservation(images=[Image.fromarray(self._env.render())], text=text)
        return text if self._is_text else str(self._env.render())


def _make_env(config: JsonMapping) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"gymnasium is not installed: {install_command('gymnasium')}.") from error
    if not isinstance(config.get("env_id"), str):
        raise ConfigError(f"env_id={config.get('env_id')!r} must be the id of an environment, such as FrozenLake-v1.")
    return gymnasium.make(config["env_id"], **(config.get("kwargs") or {}))


def _is_text(space: object) -> bool:
    from gymnasium.spaces import Text

    return isinstance(space, Text)


def _check_spaces(env: Any, config: JsonMapping) -> None:
    from gymnasium.spaces import Discrete

    actions, name = config.get("actions"), config["env_id"]
    if isinstance(env.action_space, Discrete):
        wanted = int(env.action_space.n)
        if not isinstance(actions, list) or len({str(word).lower() for word in actions}) != wanted:
            raise ConfigError(f"{name} has {wanted} actions: give `actions`, a list of {wanted} different words.")
        if not all(isinstance(word, str) and word.strip() for word in actions):
            raise ConfigError(f"actions={actions} must be texts; write numbers in quotes.")
    elif not _is_text(env.action_space):
        raise ConfigError(f"{name} has the action space {env.action_space}; a text can name Discrete and Text actions.")
    elif actions:
        raise ConfigError(f"{name} takes any text as action, so leave `actions` out.")
    if not _is_text(env.observation_space) and env.render_mode not in ("ansi", "rgb_array"):
        raise ConfigError(
            f"{name} has observations of {env.observation_space}, which are no texts. Give kwargs: "
            "{render_mode: ansi} if it can draw itself in text, or {render_mode: rgb_array} if the policy reads images."
        )
    if env.render_mode == "rgb_array":
        env.reset(seed=0)
        try:
            Image.fromarray(env.render())
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} draws no picture with render_mode: rgb_array ({error}); render must return an array of bytes, "
                "(height, width, 3)."
            ) from error
