"""The environments in the box: how they are chosen, played, and read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.environments.base import last_word
from verl.environments.grid_world import GridWorldEnvironment
from verl.environments.guess_number import GuessNumberEnvironment
from verl.environments.registry import read_environments
from verl.errors import ConfigError


def test_a_number_is_guessed():
    environment = GuessNumberEnvironment({"high": 20, "max_guesses": 3})
    assert environment.reset(seed=1, messages=[], number=7) == "Guess my number from 0 to 20. You have 3 guesses."
    assert environment.step("Is it 3, or 9? I say 9.") == ("Lower.", -0.1, False, False, {"guess": 9})
    assert environment.step("no idea, " + "9" * 5000) == ("Say a number.", -0.1, False, False, {"guess": None})
    assert environment.step("2") == ("Higher.", -0.1, False, True, {"guess": 2})
    environment.reset(seed=1, messages=[], number=7)
    assert environment.step("7") == ("Right.", 1.0, True, False, {"guess": 7})
    drawn = []
    for seed in [*range(40), *range(40)]:
        environment.reset(seed=seed, messages=[])
        drawn.append(environment.number)
    assert drawn[:40] == drawn[40:]
    assert len(set(drawn)) > 10
    assert all(0 <= number <= 20 for number in drawn)


def way(environment: GridWorldEnvironment) -> list[str]:
    """The shortest way to the goal, by trying all."""
    moves = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    ways: list[tuple[tuple[int, int], list[str]]] = [(environment.position, [])]
    seen = {environment.position}
    for place, path in ways:
        if place == environment.goal:
            return path
        for word, (down, right) in moves.items():
            there = place[0] + down, place[1] + right
            inside = min(there) >= 0 and max(there) < environment.size
            if inside and there not in environment.walls | seen:
                seen.add(there)
                ways.append((there, [*path, word]))
    raise AssertionError("there is no way")


def test_a_grid_is_walked_through():
    for seed in range(60):
        environment = GridWorldEnvironment({"walls": 4})
        picture = environment.reset(seed=seed, messages=[]).splitlines()[1:]
        assert [len(line) for line in picture] == [4] * 4
        assert sorted("".join(picture).replace(".", "")) == ["#"] * 4 + ["A", "G"]
        path = way(environment)
        for number, move in enumerate(path, 1):
            _, reward, terminated, truncated, info = environment.step(f"I go {move.upper()}.")
            assert (terminated, truncated, info) == (number == len(path), False, {"move": move})
            assert reward == (1.0 if terminated else -0.05)
    environment = GridWorldEnvironment({"max_steps": 2, "size": 2, "walls": 0})
    environment.reset(seed=0, messages=[])
    before = environment.position
    assert environment.step("hm")[1:] == (-0.05, False, False, {"move": None})
    assert environment.position == before
    assert environment.step("well")[2:4] == (False, True)


def test_the_last_word_of_a_text():
    words = ["left", "turn left", "0", "c++"]
    assert last_word("Left or TURN LEFT?", words) == "turn left"
    assert last_word("leftover 10 00", words) is None
    assert last_word("I take c++, no, 0.", words) == "0"
    assert last_word("c++", words) == "c++"
    assert last_word("", words) is None


FILE = """
from verl.environments.base import Environment

class EchoEnvironment(Environment):
    def reset(self, *, seed, messages, **row):
        return ""
    def step(self, action):
        return action, 0.0, False, False, {}

class Unfinished(Environment):
    pass

class Refusing(EchoEnvironment):
    @classmethod
    def check(cls, config):
        raise ImportError("no module named sky")
"""


def read(folder: Path, text: str):
    (folder / "echo.py").write_text(FILE)
    (folder / "environments.yaml").write_text(text.replace("echo.py", str(folder / "echo.py")))
    return read_environments(str(folder / "environments.yaml"))


def test_a_file_of_environments(tmp_path: Path):
    found = read(
        tmp_path,
        "environment:\n"
        "  - {class_name: 'echo.py:EchoEnvironment', config: {loud: true}, seed_per: sample, max_action_tokens: 5}\n"
        "  - {name: grid, class_name: verl.environments.grid_world.GridWorldEnvironment, max_observation_tokens: 64}\n",
    )
    assert list(found) == ["echo", "grid"]
    echo, grid = found.values()
    assert (echo.config, echo.seed_per, echo.max_action_tokens) == ({"loud": True}, "sample", 5)
    assert (grid.seed_per, grid.max_action_tokens, grid.max_observation_tokens) == ("prompt", None, 64)
    assert (echo.max_observation_tokens, grid.cls) == (1024, GridWorldEnvironment)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ("[{class_name: builtins.dict}]", "is no subclass of verl.environments.base.Environment"),
        ("[{class_name: 'echo.py:Echo'}]", "Echo"),
        ("[{class_name: 'echo.py:EchoEnvironment', seed_by: x}]", "unknown key 'seed_by'. Did you mean 'seed_per'?"),
        (
            "[{class_name: 'echo.py:EchoEnvironment', seed_per: x}]",
            "seed_per='x' is unknown; there are prompt and sample",
        ),
        (
            "[{class_name: 'echo.py:EchoEnvironment', max_action_tokens: 0}]",
            "max_action_tokens=0 must be a whole number",
        ),
        ("[{class_name: 'echo.py:EchoEnvironment', config: [1]}]", r"config=[1] must be a mapping"),
        ("[{class_name: 'echo.py:EchoEnvironment'}, {class_name: 'echo.py:EchoEnvironment'}]", "called 'echo' too"),
        ("[{class_name: 'echo.py:Unfinished'}]", "Unfinished has no reset and step"),
        ("[{class_name: 'echo.py:Refusing'}]", "Refusing refuses its config"),
        ("[{class_name: verl.environments.guess_number.GuessNumberEnvironment, config: {low: 9}}]", "low must be less"),
        ("[{class_name: verl.environments.grid_world.GridWorldEnvironment, config: {sise: 9}}]", "unknown: sise"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_the_run(tmp_path: Path, entries: str, problem: str):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, f"environment: {entries}")
    assert problem in str(error.value)
    assert "environment[" in str(error.value)
