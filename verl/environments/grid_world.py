"""A walk through a grid: a small environment of several steps, for first runs and tests."""

from __future__ import annotations

import random

from verl.base.types import JsonObject
from verl.environments.base import Environment, last_word
from verl.errors import ConfigError

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Row and column that each action adds."""
CONFIG = {"size": 4, "walls": 3, "max_steps": 12}  # where `config` says nothing else


class GridWorldEnvironment(Environment):
    """Walk from ``A`` to ``G`` over free cells (``.``); ``#`` is a wall.

    ``config`` may have ``size`` (4) of the square grid, the number of ``walls`` (3) and ``max_steps`` (12), after which
    the episode is truncated. The move is the last of the words up, down, left and right in the policy's turn. The goal
    is worth 1, every other turn -0.05.
    """

    @classmethod
    def check(cls, config: JsonObject) -> None:
        """See :meth:`verl.environments.base.Environment.check`."""
        values = CONFIG | config
        if unknown := sorted(set(values) - set(CONFIG)):
            raise ConfigError(f"unknown: {', '.join(unknown)}. Known: {', '.join(CONFIG)}.")
        if any(type(value) is not int for value in values.values()):
            raise ConfigError(f"{values}: size, walls and max_steps are whole numbers.")
        if values["size"] < 2 or not 0 <= values["walls"] <= values["size"] or values["max_steps"] < 1:
            raise ConfigError(f"{values}: size is at least 2, walls 0 to size, max_steps at least 1.")

    def reset(self, *, seed: int, messages: list[JsonObject], **kwargs: object) -> str:
        """Begin with a new grid in which the goal can be reached."""
        values = CONFIG | self.config
        self.size, self.left = values["size"], values["max_steps"]
        draw = random.Random(seed)
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.position, self.goal, *walls = draw.sample(cells, 2 + min(values["walls"], len(cells) - 2))
            self.walls = set(walls)
            if self.goal in self._reached():
                return f"Walk from A to G. Answer up, down, left or right.\n{self._picture()}"

    def step(self, action: str, **kwargs: object) -> tuple[str, float, bool, bool, JsonObject]:
        """Make a move; without one, or against a wall, the position stays."""
        self.left -= 1
        move = last_word(action, MOVES)
        if move is not None:
            row, column = self.position[0] + MOVES[move][0], self.position[1] + MOVES[move][1]
            self.position = (row, column) if self._is_free(row, column) else self.position
        is_there = self.position == self.goal
        return self._picture(), 1.0 if is_there else -0.05, is_there, not is_there and self.left == 0, {"move": move}

    def _is_free(self, row: int, column: int) -> bool:
        return 0 <= row < self.size and 0 <= column < self.size and (row, column) not in self.walls

    def _reached(self) -> set[tuple[int, int]]:
        """Return the cells that can be reached from the position."""
        reached, new = {self.position}, [self.position]
        while new:
            row, column = new.pop()
            around = {(row + down, column + right) for down, right in MOVES.values()}
            fresh = {cell for cell in around if self._is_free(*cell)} - reached
            reached |= fresh
            new += fresh
        return reached

    def _picture(self) -> str:
        signs = {self.goal: "G", **dict.fromkeys(self.walls, "#"), self.position: "A"}
        return "\n".join("".join(signs.get((r, c), ".") for c in range(self.size)) for r in range(self.size))
