"""The adapter of gymnasium: spaces of texts, seeds, and environments that no text can play."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from verl.errors import ConfigError
from verl.plugins.gymnasium.environment import GymnasiumEnvironment


class Riddle(gymnasium.Env):
    """Says a letter, which is to be said back."""

    observation_space = gymnasium.spaces.Text(20, charset="Say abcWel")
    action_space = gymnasium.spaces.Text(3, charset="abc")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.letter = (options or {}).get("letter") or "abc"[int(self.np_random.integers(3))]
        return f"Say {self.letter}", {}

    def step(self, action: str):
        return "Well", float(action == self.letter), True, False, {"said": action}


gymnasium.register("verl/Riddle-v0", entry_point=Riddle)


def test_texts_in_and_out():
    environment = GymnasiumEnvironment({"env_id": "verl/Riddle-v0"})
    assert environment.reset(seed=1, messages=[], letter="b") == "Say b"
    said, reward, terminated, truncated, info = environment.step("I say b")
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"is_invalid": True})
    assert said.startswith("That is no action of Text(")
    assert environment.step("  b\n") == ("Well", 1.0, True, False, {"said": "b"})
    first = [environment.reset(seed=seed, messages=[]) for seed in range(20)]
    assert first == [environment.reset(seed=seed, messages=[]) for seed in range(20)]
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "env_id=None must be the id of an environment"),
        ({"env_id": "FrozenLake-v1", "kwarg": {}}, "unknown: kwarg. Known: env_id, kwargs, actions, invalid_reward."),
        ({"env_id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}}, "has 4 actions: give `actions`, a list of 4"),
        ({"env_id": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, "give `actions`, a list of 4 different words"),
        ({"env_id": "FrozenLake-v1", "actions": [0, 1, 2, 3]}, "must be texts; write numbers in quotes"),
        ({"env_id": "FrozenLake-v1", "actions": ["l", "d", "r", "u"]}, "Give kwargs: {render_mode: ansi}"),
        ({"env_id": "verl/Riddle-v0", "actions": ["a"]}, "takes any text as action"),
        ({"env_id": "MountainCarContinuous-v0"}, "a text can name Discrete and Text actions"),
    ],
)
def test_environments_that_no_text_can_play_are_refused(config: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        GymnasiumEnvironment.check(config)
    assert problem in str(error.value)
