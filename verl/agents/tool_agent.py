"""The agent loop of tools and simulated users.

The policy calls tools and goes on with their results until it answers without a call. Where the row names an
interaction, that answers as the user, and the conversation goes on until it ends it::

    generate ──► parse ──► calls ──► run them ──► results as tokens with mask 0 ──► generate …
                   └─ no call: done, or the user's answer as tokens with mask 0 ──► generate …
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.images import INPUTS
from verl.agents.loop import (
    JUDGE_ADDRESS,
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
    require_judge,
)
from verl.agents.outputs import conversation_outputs
from verl.agents.parsers import FunctionCall, ParsedTurn, ToolParser, get_tool_parser
from verl.agents.simulated_user import SimulatedUser
from verl.agents.tool_calls import CallFailure, ToolCallResult, ToolLimits, ToolRunner, ToolSession, descriptions
from verl.base.types import JsonMapping, JsonObject
from verl.config import PPOConfig, RolloutConfig
from verl.config.agent import TrajectoryStatus
from verl.datasets.chat import as_messages
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.utils.tool_registry import initialize_tools
from verl.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION = "policy"
"""All turns are one conversation, which stays with one engine, whose cache of keys and values holds its beginning."""

STATE_HOOKS = ("_handle_pending_state", "_handle_generating_state", "_handle_processing_tools_state", "_call_tool")
"""Methods by which loops of other versions, which are state machines, are extended."""


@dataclass(frozen=True)
class ToolAgentParts:
    """Objects that the trajectories of one process share."""

    template: ChatTemplate
    tools: ToolRunner
    parser: ToolParser
    interactions: Mapping[str, BaseInteraction]

    @classmethod
    def from_config(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Make the tools, the template, the parser and the interactions of a configuration.

        Raises:
            ConfigError: a file of tools or of interactions is wrong, there is no parser of this name, or the tokenizer
                cannot be used.
        """
        rollout = config.actor_rollout_ref.rollout
        turns = rollout.multi_turn
        template = ChatTemplate.from_config(config, tokenizer)
        limits = ToolLimits(
            timeout_s=rollout.agent.tool_timeout_s,
            max_parallel_calls=turns.max_parallel_calls,
            max_response_tokens=turns.max_tool_response_length,
            truncate_side=turns.tool_response_truncate_side,
            malformed_penalty=turns.malformed_call_penalty,
        )
        path = turns.interaction_config_path
        interactions = initialize_interactions_from_config(path) if path else {}
        for name, interaction in interactions.items():
            if interaction.asks_judge:
                require_judge(config, f"the interaction '{name}' of {path}")
        tools = initialize_tools(turns.tool_config_path, turns.function_tool_path)
        runner = ToolRunner(tools, template.control.shorten, limits)
        template.guarded(runner.schemas)  # here, so that a template that writes no tools is warned of at the start
        return cls(
            template,
            runner,
            get_tool_parser(turns.format, tokenizer),
            interactions,
        )


def described_tools(rollout: RolloutConfig) -> list[JsonObject]:
    """Return the descriptions of a configuration's tools, as chat templates take them.

    Raises:
        ConfigError: a file of tools is wrong.
    """
    turns = rollout.multi_turn
    tools = initialize_tools(turns.tool_config_path, turns.function_tool_path)
    try:
        return descriptions(tools)
    finally:
        for tool in tools:
            tool.close()


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Let the policy call tools and answer its user, until it ends or a limit of turns or tokens is reached.

    A call that fails, or that cannot be read, is answered with the reason. Rewards of calls are ``tool_rewards``, one
    for each call, among the columns of the batch; scores of the user are ``turn_scores``, one for each turn of the
    policy, 0 for turns that the user did not answer. ``malformed_call_penalty`` is in ``turn_rewards``.
    """

    shared: ToolAgentParts

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods of a loop of states, which :meth:`run` would never call.

        Raises:
            ConfigError: the class has one, and no ``run`` of its own that calls it.
        """
        super().__init_subclass__(**kwargs)
        unused = [name for name in vars(cls) if name in STATE_HOOKS]
        if unused and cls.run is ToolAgentLoop.run:
            raise ConfigError(
                f"{cls.__name__}.{unused[0]} would never be called: ToolAgentLoop.run has no states. Define run too, "
                "change the tool itself (BaseTool.execute), or derive from AgentLoopBase."
            )

    @classmethod
    def prepare(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> ToolAgentParts:
        """See :meth:`AgentLoopBase.prepare`."""
        return ToolAgentParts.from_config(config, tokenizer)

    @classmethod
    def discard(cls, shared: ToolAgentParts) -> None:
        """See :meth:`AgentLoopBase.discard`."""
        shared.tools.close()

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`."""
        parts = self.shared
        images = ImagePrompts.from_processor(self.processor)
        messages = as_messages(list(kwargs["raw_prompt"]), "the prompt", with_images=images is not None)
        tools = parts.tools.schemas or None
        template = parts.template.with_thinking(kwargs.get(self.dataset_config.enable_thinking_key or ""))
        conversation = Conversation(template, messages, tools, images=images, of_row=kwargs.get(INPUTS))
        conversation.truncate_prompt(self.rollout_config.prompt_length, self.dataset_config.truncation)
        calls = _Calls()
        user = SimulatedUser.from_row(
            parts.interactions,
            kwargs.get("interaction_kwargs"),
            self.rollout_config.agent.tool_timeout_s,
            parts.tools.threads,
            {JUDGE_ADDRESS: kwargs[JUDGE_ADDRESS]} if JUDGE_ADDRESS in kwargs else {},
            images,
        )
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(parts.tools.session(kwargs.get("tools_kwargs"), images))
            if user is not None:
                await stack.enter_async_context(user)
            counterparts = _Counterparts(session, calls, user)
            status = await self._converse(conversation, counterparts, sampling_params)
            final_rewards = await session.rewards()
        return conversation_outputs(
            conversation,
            status=status,
            metrics=AgentLoopMetrics(generate_sequences=self.server_manager.seconds, tool_calls=calls.seconds),
            messages=self._recorded_messages(conversation, counterparts),
            turn_scores=counterparts.turn_scores(),
            turn_rewards=counterparts.penalties if any(counterparts.penalties) else None,
            columns={
                **calls.columns(),
                "tool_extra_fields": {
                    "final_rewards": final_rewards,
                    "metrics": [result.metrics for result in calls.results],
                },
                "rendering_differences": dict(conversation.check()),
            },
        )

    async def _converse(
        self, conversation: Conversation, counterparts: _Counterparts, sampling_params: JsonMapping
    ) -> TrajectoryStatus:
        turns, most_tokens = self.rollout_config.multi_turn, self.rollout_config.response_length
        turn_count = 0
        while True:
            left = conversation.tokens_left(most_tokens)
            if not left:
                return "context_full"
            limits = {**sampling_params, "max_tokens": min(left, sampling_params.get("max_tokens") or left)}
            context = conversation.ids
            output = await self.server_manager.generate(
                CONVERSATION, prompt_ids=context, sampling_params=limits, image_data=conversation.image_data
            )
            turn_count += 1
            parser = self.shared.parser
            # A call that the policy only thinks of is none.
            is_thinking = parser.is_thinking_after(context)
            turn = await parser.parse(output.token_ids, self.shared.tools.schemas, is_thinking)
            conversation.add_drawn(output.token_ids, output.log_probs or [], turn.message())
            # Each turn of the policy but the last is followed by one of the tools or of the user.
            is_last = turn_count in (turns.max_assistant_turns, (turns.max_user_turns or -1) + 1)
            limit = "context_full" if output.stop_reason != "stop" else "turns_used_up" if is_last else None
            answers = await counterparts.answer(turn, conversation.messages, limit)
            if isinstance(answers, str):
                return answers
            # The next turn needs room for a token.
            room = conversation.tokens_left(most_tokens) - 1
            if not conversation.add_messages(answers, room, turns.tool_response_truncate_side):
                return "context_full"

    def _recorded_messages(self, conversation: Conversation, counterparts: _Counterparts) -> list[JsonObject]:
        """The messages with the times of what the policy and others said; at the end the results that had no room."""
        turns, results, times = (
            iter(self.server_manager.turns),
            iter(counterparts.calls.results),
            iter(counterparts.times),
        )
        messages = []
        for index, message in enumerate(conversation.messages):
            more: JsonObject = {}
            if index >= conversation.prompt_length:
                match message["role"]:
                    case "assistant":
                        policy_turn = next(turns)
                        more = {"seconds": policy_turn.seconds, "began": policy_turn.began}
                    case "tool":
                        more = _call_columns(next(results))
                    case _:
                        began, seconds = next(times)
                        more = {"seconds": seconds, "began": began}
            messages.append({**message, **more})
        for result in results:
            unseen = {"role": "tool", "content": result.response.text or ""}
            messages.append({**unseen, **_call_columns(result), "is_left_out": True})
        return messages


@dataclass
class _Counterparts:
    """The tools, and the simulated user if there is one, that answer the policy in one trajectory."""

    tools: ToolSession
    calls: _Calls
    user: SimulatedUser | None
    scores: list[float | None] = field(default_factory=list)
    """The user's score of each turn of the policy."""
    penalties: list[float] = field(default_factory=list)
    """Penalty of each turn of the policy for unreadable calls, at most 0, which is added to the score."""
    times: list[tuple[float, float]] = field(default_factory=list)
    """For each answer of the user the time of the request (seconds since 1970), and its duration."""

    async def answer(
        self, turn: ParsedTurn, messages: list[JsonObject], limit: TrajectoryStatus | None
    ) -> list[JsonObject] | TrajectoryStatus:
        """Answer a turn; at the end of the conversation return how it ended.

        Args:
            turn: the policy's.
            messages: the conversation, with this turn.
            limit: the limit that lets no other turn follow. The user scores this one nevertheless.
        """
        has_calls = bool(turn.calls or turn.malformed)
        # A call that the limit of tokens cut off is not the policy's fault.
        refused = [] if limit == "context_full" else [self.tools.refuse(bad) for bad in turn.malformed]
        self.penalties.append(sum(result.reward or 0.0 for result in refused))
        if has_calls and limit is None:
            self.scores.append(None)
            results = await self.calls.make(turn.calls, self.tools, refused)
            return [{"role": "tool", "content": _content(result)} for result in results]
        self.calls.results += refused
        if self.user is None:
            return limit if limit == "context_full" or (limit and has_calls) else "done"
        asked_at, began = time.time(), time.monotonic()
        user_answer = await self.user.answer(messages)
        self.times.append((asked_at, time.monotonic() - began))
        self.scores.append(user_answer.score)
        if user_answer.is_end and limit != "context_full" and not has_calls:
            return "done"
        return limit or [{"role": "user", "content": user_answer.content}]

    def turn_scores(self) -> list[float] | None:
        """Return a score for each turn of the policy; None if the user gives no scores."""
        if all(score is None for score in self.scores):
            return None
        return [score or 0.0 for score in self.scores]


class _Calls:
    """The tool calls of one trajectory."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.results: list[ToolCallResult] = []

    def columns(self) -> JsonObject:
        """Return rewards, number and failures of the calls."""
        failures = [result.failure for result in self.results]
        return {
            "tool_rewards": [result.reward for result in self.results],
            "tool_call_counts": len(failures) - failures.count(CallFailure.MALFORMED),
            "tool_failures": dict(Counter(failure.value for failure in failures if failure is not None)),
        }

    async def make(
        self, calls: Sequence[FunctionCall], session: ToolSession, refused: list[ToolCallResult]
    ) -> list[ToolCallResult]:
        """Make the calls of a turn, beside which it had some that were ``refused``."""
        began = time.monotonic()
        results = [*await session.call_all(calls), *refused]
        self.seconds += time.monotonic() - began
        self.results += results
        return results


def _content(result: ToolCallResult) -> str | list[JsonObject]:
    """The content of a result's message: its images and videos, and then its text."""
    text = result.response.text or ""
    if not result.shown:
        return text
    return [*result.shown, {"type": "text", "text": text}] if text else list(result.shown)


def _call_columns(result: ToolCallResult) -> JsonObject:
    """Return what a dump says of a call beside its message."""
    columns = {
        "name": result.name,
        "seconds": result.seconds,
        "waited_s": result.waited_s,
        "began": result.began,
        "reward": result.reward,
    }
    return columns | ({"failure": result.failure.value} if result.failure else {})
