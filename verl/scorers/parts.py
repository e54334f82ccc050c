"""Components for custom rewards: format, length, repetition, and their weighted sum. All are pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence

from verl.errors import ConfigError

_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts without spaces between words."""
_UNIT = re.compile(rf"[{_SPACELESS}]|(?:(?![{_SPACELESS}])\w)+|[^\w\s]")


def weighted_sum(components: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Combine several rewards into ``score``, their weighted sum, and report each unweighted under its name.

        score = Σ_k weight_k · value_k

    Args:
        components: (weight, value) by name.

    Raises:
        ConfigError: there are no components, or one is called ``score``.

    >>> weighted_sum({"accuracy": (0.9, 1.0), "format": (0.1, 0.0)})
    {'score': 0.9, 'accuracy': 1.0, 'format': 0.0}
    """
    if not components or "score" in components:
        raise ConfigError(
            f"weighted_sum: the components are {', '.join(components) or 'none'}; "
            "give at least one, and none called 'score', which is the name of the sum."
        )
    total = sum(weight * value for weight, value in components.values())
    return {"score": total} | {name: value for name, (_, value) in components.items()}


def last_tag(text: str, tag: str = "answer") -> str | None:
    """Return the stripped content of the last complete ``<tag>...</tag>`` of a text; None if there is none.

    >>> last_tag("<answer>1</answer> no, <answer> 2 </answer>")
    '2'
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def format_reward(text: str, tags: Sequence[str] = ("think", "answer"), nothing_outside: bool = False) -> float:
    """Return 1 if every tag is opened once and closed once, in the given order and without nesting; else 0.

    This is the format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2). The content of the tags does not
    matter.

    Args:
        text: the response.
        tags: names of the tags.
        nothing_outside: whether text other than white space before, between or after the tags makes the score 0.

    Raises:
        ConfigError: ``tags`` is empty, has a tag twice, or is a string.

    >>> format_reward("<think>2 + 2</think> so <answer>4</answer>")
    1.0
    >>> format_reward("<think>2 + 2</think> so <answer>4</answer>", nothing_outside=True)
    0.0
    """
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
        raise ConfigError(f"format_reward: tags={tags!r}; give a list of different names, such as ['think', 'answer'].")
    position, outside = 0, ""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        start, end = text.index(opening), text.index(closing)
        if not position <= start < end:
            return 0.0
        outside += text[position:start]
        position = end + len(closing)
    outside += text[position:]
    return 0.0 if nothing_outside and outside.strip() else 1.0


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    r"""Soft overlong punishment: 0 up to ``max_length - buffer`` tokens, then linearly down to ``-factor``.

        penalty(l) = -factor · clip((l - (L_max - L_buffer)) / L_buffer, 0, 1)

    Equation 13 of DAPO, https://arxiv.org/abs/2503.14476. It is added to the score.

    Args:
        length: l, tokens of the response.
        max_length: L_max, tokens of the longest response.
        buffer: L_buffer, number of tokens over which the penalty grows.
        factor: penalty at ``max_length`` tokens and above, as a positive number.

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
    r"""Cosine length reward: higher for short right answers, and by default for long wrong ones.

        R = exceeded                                         if l ≥ L_max
        R = r_L + (r_0 - r_L) · (1 + cos(π · l / L_max)) / 2      otherwise

    with (r_0, r_L) = (``correct_short``, ``correct_long``) for a right answer and (``wrong_short``,
    ``wrong_long``) for a wrong one. From "Demystifying Long Chain-of-Thought Reasoning in LLMs",
    https://arxiv.org/abs/2502.03373, with its numbers as defaults.

    Args:
        is_correct: whether the answer is right.
        length: l, tokens of the response.
        max_length: L_max, tokens of the longest response.
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


def repetition_penalty(text: str | Sequence[Hashable], ngram_size: int = 4, max_penalty: float = 1.0) -> float:
    """Penalty proportional to the fraction of repeated n-grams, in (``-max_penalty``, 0].

        penalty = -max_penalty · (1 - distinct n-grams / n-grams)

    After the n-gram repetition penalty of https://arxiv.org/abs/2502.03373, summed over
    the response and made independent of its length. It is 0 for a text of fewer than two n-grams.

    Args:
        text: the response, or its token ids. Text is split into words and signs, or into characters in scripts
            without spaces.
        ngram_size: n.
        max_penalty: limit for an endlessly repeated text, as a positive number.

    Raises:
        ConfigError: ``ngram_size`` is below 1, or ``max_penalty`` is negative.

    >>> repetition_penalty("yes yes yes yes yes", ngram_size=2)  # four n-grams, one distinct
    -0.75
    """
    if ngram_size < 1 or max_penalty < 0:
        raise ConfigError(
            f"repetition_penalty: ngram_size={ngram_size} must be at least 1 and max_penalty={max_penalty} at least 0."
        )
    units = _UNIT.findall(text.lower()) if isinstance(text, str) else text
    count = len(units) - ngram_size + 1
    if count < 2:
        return 0.0
    distinct = {tuple(units[start : start + ngram_size]) for start in range(count)}
    return -max_penalty * (count - len(distinct)) / count
