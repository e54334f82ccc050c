"""The agent loop of environments: every turn of the policy is an action, every observation the next turn's question.

reset ──► prompt ──► generate ──► step ──► observation as tokens with mask 0 ──► generate …
                                   └─ terminated, truncated, or a limit: score, close
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.episode import Episode
from verl.agents.images import INPUTS
from verl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.agents.outputs import conversation_outputs
from verl.agents.parsers import ParsedTurn, ToolParser, get_tool_parser
from verl.base.types import JsonObject
from verl.config import PPOConfig
from verl.config.agent import ENVIRONMENT_AGENT, TrajectoryStatus
from verl.datasets.chat import Message, as_messages
from verl.environments.registry import EnvironmentEntry, environment_of_row, read_environments
from verl.tools.threads import LoopThreads
from verl.utils.transformers_private import decoded
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION = "policy"
"""An episode is one conversation, which stays with one engine, whose cache of keys and values holds its beginning."""


@dataclass(frozen=True)
class EnvironmentAgentParts:
    """Objects that the trajectories of one process share."""

    template: ChatTemplate
    parser: ToolParser
    environments: Mapping[str, EnvironmentEntry]
    threads: LoopThreads = field(default_factory=LoopThreads)


@register(ENVIRONMENT_AGENT)
class EnvironmentAgentLoop(AgentLoopBase):
    """Play an episode of the row's environment, until it ends or a limit of turns or tokens is reached.

    Rewards of the turns are ``turn_scores``, whose sum is the score; without any, the reward function scores the
    conversation. ``environment_info`` is what the last step said beside them.
    """

    shared: EnvironmentAgentParts

    @classmethod
    def prepare(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentAgentParts:
        """See :meth:`AgentLoopBase.prepare`."""
        turns = config.actor_rollout_ref.rollout.multi_turn
        return EnvironmentAgentParts(
            ChatTemplate.from_config(config, tokenizer),
            get_tool_parser(turns.format, tokenizer),
            read_environments(path) if (path := turns.environment_config_path) else {},
        )

    @classmethod
    def discard(cls, shared: EnvironmentAgentParts) -> None:
        """See :meth:`AgentLoopBase.discard`."""
        shared.threads.close()

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`."""
        entry, arguments = environment_of_row(self.shared.environments, kwargs.get("environment_kwargs"))
        images = ImagePrompts.from_processor(self.processor)
        prompt = as_messages(list(kwargs["raw_prompt"]), "the prompt", with_images=images is not None)
        shorten, limit_s = self.shared.template.control.shorten, self.rollout_config.agent.tool_timeout_s
        async with Episode(entry, shorten, limit_s, self.shared.threads, images) as episode:
            began = time.monotonic()
            messages, tools = await episode.reset(prompt, self._seed(entry), arguments)
            played = _PlayedEpisode(episode, entry, bool(tools), seconds=time.monotonic() - began)
            template = self.shared.template.with_thinking(kwargs.get(self.dataset_config.enable_thinking_key or ""))
            conversation = Conversation(template, messages, tools or None, images=images, of_row=kwargs.get(INPUTS))
            conversation.truncate_prompt(self.rollout_config.prompt_length, self.dataset_config.truncation)
            status = await self._play(conversation, played, sampling_params)
            rest = await episode.score()
        return conversation_outputs(
            conversation,
            status=status,
            metrics=AgentLoopMetrics(generate_sequences=self.server_manager.seconds, tool_calls=played.seconds),
            messages=self._recorded_messages(conversation, played),
            turn_scores=turn_scores(played.rewards, rest),
            columns={"environment_info": played.info, "rendering_differences": dict(conversation.check())},
        )

    def _seed(self, entry: EnvironmentEntry) -> int:
        """Seed of the episode. A prompt's id names the training step, so that a repeated row meets another episode."""
        sample = self.server_manager.sample
        sample_index = sample.sample_index if entry.seed_per == "sample" else -1
        return sample_seed(self.rollout_config.seed, 0, sample.uid, sample_index) % 2**31

    async def _play(
        self, conversation: Conversation, played: _PlayedEpisode, sampling_params: Mapping[str, object]
    ) -> TrajectoryStatus:
        turns, most_tokens = self.rollout_config.multi_turn, self.rollout_config.response_length
        most_turns = [turns.max_assistant_turns, turns.max_user_turns and turns.max_user_turns + 1]
        while left := conversation.tokens_left(most_tokens):
            limits = [left, sampling_params.get("max_tokens"), played.entry.max_action_tokens]
            params = {**sampling_params, "max_tokens": min(limit for limit in limits if limit)}
            context = conversation.ids
            output = await self.server_manager.generate(
                CONVERSATION, prompt_ids=context, sampling_params=params, image_data=conversation.image_data
            )
            turn = await self._read(context, output.token_ids, conversation)
            conversation.add_drawn(output.token_ids, output.log_probs or [], turn.message())
            end = await played.step(conversation)
            if end is not None:
                return end
            if len(played.rewards) in most_turns:
                return "turns_used_up"
            # The next turn needs room for a token.
            if not conversation.add_messages(played.answer, conversation.tokens_left(most_tokens) - 1):
                break
        return "context_full"

    def _recorded_messages(self, conversation: Conversation, played: _PlayedEpisode) -> list[JsonObject]:
        """Return the messages; those of the policy with times of its turn and of the environment, and the reward."""
        turns = zip(self.server_manager.turns, played.step_seconds, played.rewards, strict=True)
        messages = []
        for index, message in enumerate(conversation.messages):
            more: JsonObject = {}
            if index >= conversation.prompt_length and message["role"] == "assistant":
                policy_turn, in_step, reward = next(turns)
                more = {"seconds": policy_turn.seconds, "began": policy_turn.began, "environment_seconds": in_step}
                more["reward"] = reward
            messages.append({**message, **more})
        return messages

    async def _read(self, context: list[int], token_ids: list[int], conversation: Conversation) -> ParsedTurn:
        parser = self.shared.parser
        turn = await parser.parse(token_ids, conversation.tools, parser.is_thinking_after(context))
        if turn.calls and not conversation.tools:  # what looks like a call is a text like any other
            return ParsedTurn(decoded(self.tokenizer, token_ids, skip_special_tokens=True))
        return turn


@dataclass
class _PlayedEpisode:
    """An episode in progress, with the times and rewards of its turns."""

    episode: Episode
    entry: EnvironmentEntry
    has_tools: bool
    seconds: float
    """Time in the environment."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds that the environment took to answer each turn of the policy."""
    rewards: list[float | None] = field(default_factory=list)
    """Reward of each turn of the policy."""
    answer: list[Message] = field(default_factory=list)
    info: JsonObject = field(default_factory=dict)

    async def step(self, conversation: Conversation) -> TrajectoryStatus | None:
        """Give the environment the policy's last turn; return how it ended the episode, or None."""
        turn = conversation.messages[-1]
        began = time.monotonic()
        result = await self.episode.step(turn["content"] or "", turn.get("tool_calls", []) if self.has_tools else None)
        self.step_seconds.append(time.monotonic() - began)
        self.seconds += self.step_seconds[-1]
        self.rewards.append(result.reward)
        self.answer, self.info = result.messages, result.info
        return "done" if result.terminated else "turns_used_up" if result.truncated else None


def turn_scores(rewards: list[float | None], rest: float | None) -> list[float] | None:
    """Return a score for each turn, with the reward of the whole episode on the last one; None if there is none.

    >>> turn_scores([0.5, None], 1.0)
    [0.5, 1.0]
    """
    if rest is None and all(reward is None for reward in rewards):
        return None
    scores = [reward or 0.0 for reward in rewards]
    return [*scores[:-1], scores[-1] + (rest or 0.0)] if scores else []
