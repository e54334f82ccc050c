"""Rewards for the form of a response, tags like ``<think>``: pure functions for rewards of your own."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ConfigError


def last_tag(text: str, tag: str = "answer") -> str | None:
    """What the last complete ``<tag>...</tag>`` of a text holds, without the white space around it.

    Returns:
        None if there is none.

    >>> last_tag("<answer>1</answer> no, <answer> 2 </answer>")
    '2'
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def format_reward(text: str, tags: Sequence[str] = ("think", "answer"), nothing_outside: bool = False) -> float:
    """1 if every tag is opened once and closed once, one after the other in the given order; else 0.

    This is the format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2). What the tags hold is
    not looked at, so it works in any language. Tags do not nest: each closes before the next opens.

    Args:
        text: the response.
        tags: names of the tags.
        nothing_outside: whether text before, between or after the tags makes the score 0 (white space does not).

    Returns:
        1.0 or 0.0.

    Raises:
        ConfigError: no tags, a tag twice, or a string instead of a list of them.

    >>> format_reward("<think>2 + 2</think> so <answer>4</answer>")
    1.0
    >>> format_reward("<think>2 + 2</think> so <answer>4</answer>", nothing_outside=True)
    0.0
    """
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
        raise ConfigError(f"format_reward: tags={tags!r}; give a list of different names, such as ['think', 'answer'].")
    place, outside = 0, ""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        start, end = text.index(opening), text.index(closing)
        if not place <= start < end:
            return 0.0
        outside += text[place:start]
        place = end + len(closing)
    outside += text[place:]
    return 0.0 if nothing_outside and outside.strip() else 1.0
