"""Conversations, tools and agent loops. The sections exist so that scripts compose; turning them on is refused."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.base_config import BaseConfig, section, setting, subsection

NO_AGENT = "agent loops are not in this version; leave it at its default, every prompt gets one response"
NO_MULTI_TURN = (
    "conversations and tools are not in this version; leave it at its default, every prompt gets one response"
)


@section
class CustomAsyncServerConfig(BaseConfig):
    """A server class of your own."""

    hydra_target: ClassVar[str] = "verl.workers.config.CustomAsyncServerConfig"

    path: str | None = setting(None, refuse=NO_AGENT)
    """File that holds the class."""
    name: str | None = setting(None, refuse=NO_AGENT)
    """Name of the class."""


@section
class AgentLoopConfig(BaseConfig):
    """Agent loops: code that drives the policy through an environment."""

    hydra_target: ClassVar[str] = "verl.workers.config.AgentLoopConfig"

    num_workers: int = setting(8, ge=1, hint="used by agent loops, which are not in this version")
    """Processes that run agent loops."""
    default_agent_loop: str = setting("single_turn_agent", refuse=NO_AGENT)
    """Loop of rows that name none."""
    agent_loop_config_path: str | None = setting(None, refuse=NO_AGENT)
    """File that lists further loops."""
    custom_async_server: CustomAsyncServerConfig = subsection(CustomAsyncServerConfig)
    """A server class of your own."""


@section
class MultiTurnConfig(BaseConfig):
    """Conversations in which tools or a simulated user answer the policy."""

    hydra_target: ClassVar[str] = "verl.workers.config.MultiTurnConfig"

    enable: bool = setting(False, refuse=NO_MULTI_TURN)
    """Let responses go over several turns."""
    max_assistant_turns: int | None = setting(None, ge=1)
    """Most turns of the policy."""
    tool_config_path: str | None = setting(None, refuse=NO_MULTI_TURN)
    """File that lists the tools."""
    max_user_turns: int | None = setting(None, ge=1)
    """Most turns of the user."""
    max_parallel_calls: int = setting(1, ge=1)
    """Most tool calls of one turn."""
    max_tool_response_length: int = setting(256, ge=1)
    """Longest answer of a tool in tokens."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = setting("middle")
    """Where a longer answer is cut."""
    interaction_config_path: str | None = setting(None, refuse=NO_MULTI_TURN)
    """File that lists the simulated users."""
    use_inference_chat_template: bool = setting(False)
    """Write the conversation as at inference time."""
    tokenization_sanity_check_mode: Literal["strict", "disable", "ignore_strippable"] = setting("strict")
    """How turns that tokenise otherwise as a whole are treated."""
    format: str = setting("hermes")
    """Syntax of tool calls."""
    num_repeat_rollouts: int | None = setting(None, ge=1)
    """Repeats of one conversation."""
