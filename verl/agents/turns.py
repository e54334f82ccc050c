"""The turns of the policy in a trajectory, and which tokens of a sequence it drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.protocol.shared import SharedTensors


@dataclass(frozen=True)
class DrawnTurn:
    """A response as it was asked for and drawn."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    weight_version: int
    seconds: float = 0.0
    """Time from the call to the answer."""
    began: float = 0.0
    """When it was asked for, in seconds since 1970."""
    images: SharedTensors | None = None
    """``pixel_values`` and ``image_grid_thw`` of the images that it was asked with; None: none."""
    num_preempted: int | None = None
    """How often the engine interrupted it for want of memory; None where the engine does not tell."""


def preemptions(turns: Sequence[DrawnTurn]) -> int:
    """Return how often engines interrupted the turns of a trajectory; -1 where one does not tell, or without turns.

    >>> turns = [DrawnTurn([1], [2], [-0.5], 0, num_preempted=number) for number in (2, 1, None)]
    >>> preemptions(turns[:2]), preemptions(turns), preemptions([])
    (3, -1, -1)
    """
    known = [turn.num_preempted for turn in turns if turn.num_preempted is not None]
    return sum(known) if known and len(known) == len(turns) else -1


def drawn_log_probs(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> list[float | None]:
    """Return the log-prob of each token that the policy drew after exactly the tokens before it; None for others."""
    written = list(tokens)
    found: list[float | None] = [None] * len(written)
    for turn in turns:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        kept = written[start:end]
        if kept and kept == turn.token_ids[: len(kept)] and written[:start] == turn.prompt_ids:
            found[start : start + len(kept)] = turn.log_probs[: len(kept)]
    return found
