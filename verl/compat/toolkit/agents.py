"""What the modules of agent loops show besides the loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolListWrap:
    """A list of tools that Hydra passes on as it is."""

    tools: list[object]


async def get_trajectory_info(step: int, index: Sequence[object], validate: bool) -> list[dict[str, object]]:
    """Describe the responses of a batch.

    Args:
        step: training step.
        index: for each response which prompt it answers.
        validate: whether it is a validation.

    Returns:
        for each response ``step``, ``sample_index`` (its prompt), ``rollout_n`` (which of the responses to the prompt,
        from 0) and ``validate``.
    """
    seen: Counter[object] = Counter()
    rows = []
    for prompt in index:
        rows.append({"step": step, "sample_index": prompt, "rollout_n": seen[prompt], "validate": validate})
        seen[prompt] += 1
    return rows
