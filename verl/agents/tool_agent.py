"""The agent loop of tools and simulated users.

The policy calls tools and goes on with their results until it answers without a call. Where the row names an
interaction, that answers as the user, and the conversation goes on until it ends it::

    pending ──► generating ──► processing_tools: run the calls, results as tokens with mask 0 ──► generating …
                        └─ no call: terminated, or interacting: the user's answer with mask 0 ──► generating …

Each state has a method, which a subclass may override; :class:`AgentData` is what they share.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
from verl.agents.parsers import FunctionCall, ToolParser, get_tool_parser
from verl.agents.simulated_user import SimulatedUser
from verl.agents.tool_calls import ToolCallResult, ToolLimits, ToolRunner, descriptions
from verl.agents.tool_state import AgentData, AgentState
from verl.base.types import JsonObject
from verl.config import PPOConfig, RolloutConfig
from verl.datasets.chat import as_messages
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import initialize_tools
from verl.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION = "policy"
"""All turns are one conversation, which stays with one engine, whose cache of keys and values holds its beginning."""

NEVER_CALLED = frozenset({"_build_assistant_message", "_initialize_interactions"})
"""Methods of loops of other versions that nothing here would call."""


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

    A subclass may override the method of each state, and ``_call_tool``; one with a ``run`` of its own may call them.

    Args:
        *args: see :class:`AgentLoopBase`.
        tools: refused: the tools are those of ``multi_turn.tool_config_path`` and ``function_tool_path``.
        **kwargs: see :class:`AgentLoopBase`.
    """

    shared: ToolAgentParts

    def __init__(self, *args: Any, tools: None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tools is not None:
            raise ConfigError(
                f"{type(self).__name__}: tools are named by actor_rollout_ref.rollout.multi_turn.tool_config_path or "
                "function_tool_path; leave out the argument."
            )
        turns = self.rollout_config.multi_turn
        self.tool_parser, self.tool_schemas = self.shared.parser, self.shared.tools.schemas
        self.max_assistant_turns, self.max_user_turns = turns.max_assistant_turns, turns.max_user_turns
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self._resources = AsyncExitStack()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods that nothing would call, or that cannot be called.

        Raises:
            ConfigError: names the first one.
        """
        super().__init_subclass__(**kwargs)
        if cls.run is not ToolAgentLoop.run:
            return
        for name in sorted(NEVER_CALLED & vars(cls).keys()):
            raise ConfigError(
                f"{cls.__name__}.{name} would never be called. Override a method of a state "
                "(_handle_generating_state, ...), or define run too."
            )
        is_called = cls._handle_processing_tools_state is ToolAgentLoop._handle_processing_tools_state
        try:
            inspect.signature(cls._call_tool).bind("self", "tool_call", "tools_kwargs", "agent_data")
        except TypeError as error:
            if is_called:
                raise ConfigError(
                    f"{cls.__name__}._call_tool cannot be called: {error}. It takes (self, tool_call, tools_kwargs, "
                    "agent_data)."
                ) from error

    @property
    def tools(self) -> Mapping[str, BaseTool]:
        """The tools by name."""
        return self.shared.tools.tools

    @property
    def max_parallel_calls(self) -> int:
        """Calls of one turn that are made."""
        return self.rollout_config.multi_turn.max_parallel_calls

    @property
    def max_tool_response_length(self) -> int:
        """Tokens of the text of one response."""
        return self.rollout_config.multi_turn.max_tool_response_length

    @property
    def interaction_config_file(self) -> str | None:
        """The file of the simulated users."""
        return self.rollout_config.multi_turn.interaction_config_path

    @property
    def interaction_map(self) -> Mapping[str, BaseInteraction]:
        """The simulated users by name."""
        return self.shared.interactions

    @classmethod
    def prepare(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> ToolAgentParts:
        """See :meth:`AgentLoopBase.prepare`."""
        return ToolAgentParts.from_config(config, tokenizer)

    @classmethod
    def discard(cls, shared: ToolAgentParts) -> None:
        """See :meth:`AgentLoopBase.discard`."""
        shared.tools.close()

    async def end_trajectory(self) -> None:
        """See :meth:`AgentLoopBase.end_trajectory`."""
        await self._resources.aclose()

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`."""
        data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            image_data=kwargs.get(INPUTS),
            request_id=CONVERSATION,
            tools_kwargs=kwargs.get("tools_kwargs") or {},
            interaction_kwargs=kwargs.get("interaction_kwargs") or {},
            row=kwargs,
        )
        state: object = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            state = await self._next_state(state, data, sampling_params)
        conversation = await self._conversation(data)
        final_rewards = await data.session.rewards()
        return conversation_outputs(
            conversation,
            status=data.status,
            metrics=AgentLoopMetrics(
                generate_sequences=self.server_manager.seconds, tool_calls=data.metrics.get("tool_calls", 0.0)
            ),
            messages=self._recorded_messages(conversation, data),
            turn_scores=data.scores_of_turns(),
            turn_rewards=data.penalties if any(data.penalties) else None,
            columns={
                **data.call_columns(),
                "tool_extra_fields": {
                    "final_rewards": final_rewards,
                    "metrics": [result.metrics for result in data.results],
                },
                "rendering_differences": dict(conversation.check()),
                **data.extra_fields,
            },
        )

    async def _next_state(self, state: object, data: AgentData, sampling_params: JsonObject) -> object:
        match state:
            case AgentState.PENDING:
                return await self._handle_pending_state(data, sampling_params)
            case AgentState.GENERATING:
                return await self._handle_generating_state(data, sampling_params)
            case AgentState.PROCESSING_TOOLS:
                return await self._handle_processing_tools_state(data)
            case AgentState.INTERACTING:
                return await self._handle_interacting_state(data)
        raise ConfigError(
            f"a method of {type(self).__name__} returned the state {state!r}; it returns an AgentState: "
            f"{', '.join(AgentState.__members__)}."
        )

    async def _conversation(self, data: AgentData) -> Conversation:
        """Return the conversation, with the tokens that an overridden method wrote into ``data``."""
        if data.conversation is not None:
            data.to_conversation(data.conversation)
            return data.conversation
        parts, row = self.shared, data.row
        images = ImagePrompts.from_processor(self.processor)
        messages = as_messages(data.messages, "the prompt", with_images=images is not None)
        template = parts.template.with_thinking(row.get(self.dataset_config.enable_thinking_key or ""))
        conversation = Conversation(
            template, messages, self.tool_schemas or None, images=images, of_row=data.image_data
        )
        conversation.truncate_prompt(self.prompt_length, self.dataset_config.truncation)
        data.session = await self._resources.enter_async_context(parts.tools.session(data.tools_kwargs, images))
        if data.interaction is None:
            data.user = SimulatedUser.from_row(
                parts.interactions,
                data.interaction_kwargs,
                self.rollout_config.agent.tool_timeout_s,
                parts.tools.threads,
                {JUDGE_ADDRESS: row[JUDGE_ADDRESS]} if JUDGE_ADDRESS in row else {},
                images,
            )
        if data.user is not None:
            await self._resources.enter_async_context(data.user)
        data.conversation = conversation
        if data.prompt_ids:  # of an overridden _handle_pending_state
            data.to_conversation(conversation)
        data.from_conversation(conversation)
        return conversation

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: JsonObject) -> AgentState:
        """Write the prompt."""
        await self._conversation(agent_data)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: JsonObject, ignore_termination: bool = False
    ) -> AgentState:
        """Let the policy draw a turn, and decide who answers it.

        Args:
            agent_data: the state of the trajectory.
            sampling_params: see :meth:`AgentLoopBase.run`.
            ignore_termination: go on although the turn was cut off by a limit of tokens.
        """
        conversation = await self._conversation(agent_data)
        agent_data.status = "done"
        left = conversation.tokens_left(self.response_length)
        if not left:
            agent_data.status = "context_full"
            return AgentState.TERMINATED
        limits = dict(sampling_params)
        most = [limits.pop(name) for name in ("max_tokens", "max_new_tokens") if limits.get(name)]
        context = agent_data.prompt_ids
        output = await self.server_manager.generate(
            agent_data.request_id,
            prompt_ids=context,
            sampling_params={**limits, "max_tokens": min(left, *most)},
            image_data=conversation.image_data,
        )
        agent_data.assistant_turns += 1
        # A call that the policy only thinks of is none.
        is_thinking = self.tool_parser.is_thinking_after(context)
        turn = await self.tool_parser.parse(output.token_ids, self.tool_schemas, is_thinking)
        conversation.add_drawn(output.token_ids, output.log_probs or [], turn.message())
        agent_data.response_ids, agent_data.tool_calls = output.token_ids, turn.calls
        agent_data.from_conversation(conversation)
        # Each turn of the policy but the last is followed by one of the tools or of the user.
        is_last = agent_data.assistant_turns in (self.max_assistant_turns, (self.max_user_turns or -1) + 1)
        is_cut = output.stop_reason != "stop" and not ignore_termination
        limit = agent_data.limit = "context_full" if is_cut else "turns_used_up" if is_last else None
        # A call that the limit of tokens cut off is not the policy's fault.
        refused = [] if limit == "context_full" else [agent_data.session.refuse(bad) for bad in turn.malformed]
        agent_data.refused = refused
        agent_data.penalties.append(sum(result.reward or 0.0 for result in refused))
        has_calls = bool(turn.calls or turn.malformed)
        if has_calls and limit is None:
            agent_data.turn_scores.append(None)
            return AgentState.PROCESSING_TOOLS
        agent_data.record(refused)
        if agent_data.user is not None or agent_data.interaction is not None:
            return AgentState.INTERACTING
        if limit == "context_full" or (limit and has_calls):
            agent_data.status = limit
        return AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Make the calls of the last turn, ``agent_data.tool_calls``, and write their results."""
        conversation, session = await self._conversation(agent_data), agent_data.session

        async def call(tool_call: FunctionCall) -> ToolCallResult:
            answer = await self._call_tool(tool_call, agent_data.tools_kwargs, agent_data)
            return await session.result(tool_call, answer)

        began = time.monotonic()
        results = [*await session.call_all(agent_data.tool_calls, call), *agent_data.refused]
        seconds = time.monotonic() - began
        agent_data.metrics["tool_calls"] = agent_data.metrics.get("tool_calls", 0.0) + seconds
        agent_data.record(results)
        messages = [{"role": "tool", "content": _content(result)} for result in results]
        return self._add(conversation, agent_data, messages)

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: JsonObject, agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, JsonObject]:
        """Make a call.

        Args:
            tool_call: one of ``agent_data.tool_calls``.
            tools_kwargs: the row's arguments of the tools by name, see :meth:`ToolRunner.session`.
            agent_data: the state of the trajectory.

        Returns:
            the response, whose text is within ``max_tool_response_length`` and, after a failure, the error; the
            reward; metrics.
        """
        agent_data.session.tools_kwargs = tools_kwargs
        result = await agent_data.session.call(tool_call, agent_data=agent_data)
        return result.response.model_copy(), result.reward, result.metrics

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Let the simulated user answer the last turn, and score it.

        Raises:
            ConfigError: ``agent_data.interaction`` is one that the program began itself.
        """
        conversation = await self._conversation(agent_data)
        if agent_data.user is None:
            raise ConfigError(
                f"{type(self).__name__} has set agent_data.interaction. Define _handle_interacting_state too, or name "
                "the interaction in interaction_kwargs of the row."
            )
        limit, has_calls = agent_data.limit, bool(agent_data.tool_calls or agent_data.refused)
        asked_at, began = time.time(), time.monotonic()
        answer = await agent_data.user.answer(conversation.messages)
        agent_data.user_times.append((asked_at, time.monotonic() - began))
        agent_data.turn_scores.append(answer.score)
        if answer.is_end and limit != "context_full" and not has_calls:
            return AgentState.TERMINATED
        if limit is not None:
            agent_data.status = limit
            return AgentState.TERMINATED
        return self._add(conversation, agent_data, [{"role": "user", "content": answer.content}])

    def _add(self, conversation: Conversation, data: AgentData, messages: list[JsonObject]) -> AgentState:
        """Write messages of tools or the user after the policy's turn, if they fit."""
        # The next turn needs room for a token.
        room = conversation.tokens_left(self.response_length) - 1
        if not conversation.add_messages(messages, room, self.tool_response_truncate_side):
            data.status = "context_full"
            return AgentState.TERMINATED
        data.user_turns += 1
        data.from_conversation(conversation)
        return AgentState.GENERATING

    def _recorded_messages(self, conversation: Conversation, data: AgentData) -> list[JsonObject]:
        """The messages with the times of what the policy and others said; at the end the results that had no room."""
        turns, results, times = iter(self.server_manager.turns), iter(data.results), iter(data.user_times)
        messages = []
        for index, message in enumerate(conversation.messages):
            more: JsonObject = {}
            if index >= conversation.prompt_length:  # an overridden method may write messages that nobody has timed
                match message["role"]:
                    case "assistant" if policy_turn := next(turns, None):
                        more = {"seconds": policy_turn.seconds, "began": policy_turn.began}
                    case "tool" if result := next(results, None):
                        more = _call_columns(result)
                    case "user" if time_and_duration := next(times, None):
                        more = dict(zip(("began", "seconds"), time_and_duration, strict=True))
                    case _:
                        pass
            messages.append({**message, **more})
        for result in results:
            unseen = {"role": "tool", "content": result.response.text or ""}
            messages.append({**unseen, **_call_columns(result), "is_left_out": True})
        return messages


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
