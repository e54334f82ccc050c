"""State of a conversation, for agent loops that users write as state machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from verl.agents.parsers import FunctionCall
from verl.interactions.base import BaseInteraction


class AgentState(Enum):
    """Next action of a loop. :class:`verl.agents.tool_agent.ToolAgentLoop` has no states; loops of users may."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class AgentData:
    """State of a conversation: its messages, tokens and results so far."""

    messages: list[dict[str, object]]
    image_data: list[object] | None
    video_data: list[object] | None
    audio_data: list[object] | None = None
    mm_processor_kwargs: dict[str, object] | None = None
    metrics: dict[str, object] = field(default_factory=dict)
    request_id: str = ""
    tools_kwargs: dict[str, object] = field(default_factory=dict)
    interaction: BaseInteraction | None = None
    interaction_kwargs: dict[str, object] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    """Tokens that the policy is given next: the prompt and all that followed."""
    response_ids: list[int] = field(default_factory=list)
    """Tokens of the last turn."""
    response_mask: list[int] = field(default_factory=list)
    """1 for each token after the first prompt that the policy drew, 0 for others."""
    response_logprobs: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    """Calls of the last turn that have not run yet."""
    routed_experts: object = None
    extra_fields: dict[str, object] = field(default_factory=dict)


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
