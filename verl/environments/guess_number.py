"""Guessing a number: a small environment for first runs and tests."""

from __future__ import annotations

import random
import re

from verl.base.types import JsonObject
from verl.environments.base import Environment
from verl.errors import ConfigError

NUMBER = re.compile(r"-?\d+")


class GuessNumberEnvironment(Environment):
    """Guess a whole number; each wrong guess is answered by "higher" or "lower".

    ``config`` may have ``low`` and ``high``, the bounds (0 and 9), and ``max_guesses`` (4), after which the episode is
    truncated. A row may give ``number``. The guess is the last number of the policy's turn. A right guess is worth 1,
    another -0.1, and so is a turn without a number.
    """

    @classmethod
    def check(cls, config: JsonObject) -> None:
        """See :meth:`verl.environments.base.Environment.check`."""
        values = {"low": 0, "high": 9, "max_guesses": 4} | config
        if invalid := [name for name, value in values.items() if type(value) is not int]:
            raise ConfigError(f"{invalid[0]}={values[invalid[0]]!r}: low, high and max_guesses are whole numbers.")
        if not values["low"] < values["high"] or values["max_guesses"] < 1:
            raise ConfigError(f"{config}: low must be less than high, and max_guesses at least 1.")

    def reset(self, *, seed: int, messages: list[JsonObject], number: int | None = None, **kwargs: object) -> str:
        """Draw a new number, unless the row gives one."""
        self.low, self.high = self.config.get("low", 0), self.config.get("high", 9)
        self.number = random.Random(seed).randint(self.low, self.high) if number is None else number
        self.left = self.config.get("max_guesses", 4)
        return f"Guess my number from {self.low} to {self.high}. You have {self.left} guesses."

    def step(self, action: str, **kwargs: object) -> tuple[str, float, bool, bool, JsonObject]:
        """Answer a guess."""
        self.left -= 1
        said = NUMBER.findall(action)
        # int() refuses thousands of digits (sys.set_int_max_str_digits).
        guess = int(said[-1]) if said and len(said[-1]) < 20 else None
        if guess == self.number:
            return "Right.", 1.0, True, False, {"guess": guess}
        answer = "Say a number." if guess is None else "Higher." if guess < self.number else "Lower."
        return answer, -0.1, False, self.left == 0, {"guess": guess}
