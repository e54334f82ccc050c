"""State of a trajectory of the tool loop, which the methods of its states share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl.agents.conversation import Conversation
from verl.agents.parsers import FunctionCall
from verl.agents.simulated_user import SimulatedUser
from verl.agents.tool_calls import CallFailure, ToolCallResult, ToolSession
from verl.base.types import JsonMapping, JsonObject
from verl.config.agent import TrajectoryStatus
from verl.interactions.base import BaseInteraction


class AgentState(Enum):
    """Next action of a loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class AgentData:
    """State of a conversation: its messages, tokens and results so far.

    The methods of :class:`verl.agents.tool_agent.ToolAgentLoop` keep the tokens in ``conversation``; the lists of
    tokens here are equal to it after each of them, and what a program writes there goes into it before the next.
    """

    messages: list[Any]
    image_data: Any = None
    """Images of the prompt: a list, or ``multi_modal_inputs`` of the row."""
    video_data: list[object] | None = None
    audio_data: list[object] | None = None
    mm_processor_kwargs: JsonObject | None = None
    metrics: JsonObject = field(default_factory=dict)
    """``tool_calls``: seconds in calls; and a program's own, which are not recorded."""
    request_id: str = ""
    tools_kwargs: JsonObject = field(default_factory=dict)
    interaction: BaseInteraction | None = None
    """A simulated user that the program began itself."""
    interaction_kwargs: JsonObject = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    """Tokens that the policy is given next: the prompt and all that followed."""
    response_ids: list[int] = field(default_factory=list)
    """Tokens of the last turn."""
    response_mask: list[int] = field(default_factory=list)
    """1 for each token after the first prompt that the policy drew, 0 for others."""
    response_logprobs: list[float] = field(default_factory=list)
    turn_scores: list[float | None] = field(default_factory=list)
    """The user's score of each turn of the policy; None where the user did not answer."""
    tool_rewards: list[float | None] = field(default_factory=list)
    """Reward of each call."""
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    """Calls of the last turn."""
    routed_experts: object = None
    extra_fields: JsonObject = field(default_factory=dict)
    """Further columns of the batch."""

    row: JsonMapping = field(default_factory=dict)
    """Columns of the data set."""
    status: TrajectoryStatus = "done"
    limit: TrajectoryStatus | None = None
    """The limit that lets no turn follow the last one. The user scores that nevertheless."""
    conversation: Conversation | None = None
    session: ToolSession = field(init=False)
    user: SimulatedUser | None = None
    results: list[ToolCallResult] = field(default_factory=list)
    refused: list[ToolCallResult] = field(default_factory=list)
    """What the last turn had in the place of calls and no parser could read."""
    penalties: list[float] = field(default_factory=list)
    """Penalty of each turn of the policy for unreadable calls, at most 0, which is added to the score."""
    user_times: list[tuple[float, float]] = field(default_factory=list)
    """For each answer of the user the time of the request (seconds since 1970), and its duration."""

    def from_conversation(self, conversation: Conversation) -> None:
        """Take the tokens of a conversation, and the messages that it got since the last time."""
        self.prompt_ids = conversation.ids
        self.response_mask = list(conversation.response_mask)
        self.response_logprobs = list(conversation.response_logprobs)
        self.messages += conversation.messages[conversation.prompt_length + self._message_count :]
        self._message_count = len(conversation.messages) - conversation.prompt_length

    _message_count: int = field(default=0, init=False)
    """Messages after the prompt that ``messages`` has from the conversation."""

    def to_conversation(self, conversation: Conversation) -> None:
        """Write the tokens into a conversation, if a program has changed them."""
        if self.prompt_ids != conversation.ids or self.response_mask != conversation.response_mask:
            conversation.rewrite(self.prompt_ids, self.response_mask)
            self.from_conversation(conversation)

    def record(self, results: list[ToolCallResult]) -> None:
        """Append results of calls and their rewards."""
        self.results += results
        self.tool_rewards += [result.reward for result in results]

    def call_columns(self) -> JsonObject:
        """Return rewards, number and failures of the calls."""
        failures = [result.failure for result in self.results]
        return {
            "tool_rewards": self.tool_rewards,
            "tool_call_counts": len(failures) - failures.count(CallFailure.MALFORMED),
            "tool_failures": dict(Counter(failure.value for failure in failures if failure is not None)),
        }

    def scores_of_turns(self) -> list[float] | None:
        """Return a score for each turn of the policy; None if the user gives no scores."""
        if all(score is None for score in self.turn_scores):
            return None
        return [score or 0.0 for score in self.turn_scores]
