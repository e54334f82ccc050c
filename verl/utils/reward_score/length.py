"""Rewards for the length of a response, in tokens. Pure functions for rewards of your own and for reward managers."""

from __future__ import annotations

import math

from verl.errors import ConfigError


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    r"""Soft overlong punishment: 0 up to ``max_length - buffer`` tokens, then linearly down to ``-factor``.

        penalty(l) = -factor · clip((l - (L_max - L_buffer)) / L_buffer, 0, 1)

    Equation 13 of DAPO, https://arxiv.org/abs/2503.14476. To be added to the score.

    Args:
        length: tokens of the response.
        max_length: L_max, the longest response.
        buffer: L_buffer, length of the stretch on which the penalty grows.
        factor: penalty of a response of ``max_length`` tokens or more, as a positive number.

    Returns:
        a number from ``-factor`` to 0.

    Raises:
        ConfigError: ``buffer`` is not in 1..max_length, or ``factor`` is negative.

    >>> soft_overlong_penalty(90, max_length=100, buffer=20, factor=1.0)
    -0.5
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong buffer={buffer} must be between 1 and the longest response, {max_length} tokens.")
    if factor < 0:
        raise ConfigError(f"overlong penalty factor={factor} must not be negative: it is subtracted from the score.")
    excess = length - (max_length - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def cosine_length_reward(
    is_correct: bool,
    length: int,
    max_length: int,
    correct_short: float = 2.0,
    correct_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float = -10.0,
) -> float:
    r"""Cosine length reward: right answers are worth more when short, wrong ones cost less when long.

        R = exceeded                                         if l ≥ L_max
        R = r_L + (r_0 - r_L) · (1 + cos(π · l / L_max)) / 2      otherwise

    with (r_0, r_L) = (``correct_short``, ``correct_long``) for a right answer and (``wrong_short``,
    ``wrong_long``) for a wrong one. From "Demystifying Long Chain-of-Thought Reasoning in LLMs",
    https://arxiv.org/abs/2502.03373, with its numbers as defaults.

    Args:
        is_correct: whether the answer is right.
        length: l, tokens of the response.
        max_length: L_max, the longest response.
        correct_short: reward of a right answer of length 0.
        correct_long: reward of a right answer just below ``max_length``.
        wrong_short: reward of a wrong answer of length 0.
        wrong_long: reward of a wrong answer just below ``max_length``.
        exceeded: reward of a response that has reached ``max_length``, right or wrong.

    Raises:
        ConfigError: ``max_length`` is not positive.

    >>> cosine_length_reward(True, 50, 100)
    1.5
    """
    if max_length <= 0:
        raise ConfigError(f"cosine_length_reward: max_length={max_length} must be positive.")
    if length >= max_length:
        return exceeded
    at_zero, at_end = (correct_short, correct_long) if is_correct else (wrong_short, wrong_long)
    return at_end + (at_zero - at_end) * (1 + math.cos(math.pi * length / max_length)) / 2
