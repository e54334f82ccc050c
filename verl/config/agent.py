"""Configuration of conversations: agent loops, their tools and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.problems import Problem

SINGLE_TURN = "single_turn_agent"
ENVIRONMENT_AGENT = "environment_agent"
TrajectoryStatus = Literal[
    "done", "turns_used_up", "context_full", "tool_error", "environment_error", "timeout", "cancelled", "agent_error"
]
"""End of a trajectory: by itself; at a limit of turns or of tokens; because a tool, its environment, or the agent's
own code failed; because it took too long; or because somebody cancelled it."""

ClassEntries = str | tuple[dict[str, object], ...] | None
"""Path of a YAML file that lists classes with their settings, or the list."""

OnFailure = Literal["train", "mask", "zero", "redraw"]
"""Treatment of a trajectory by its status: train on it; leave it out; train on it with score 0; sample it again, and
leave it out if that fails too."""


def _on_failure() -> dict[TrajectoryStatus, OnFailure]:
    return {
        "turns_used_up": "train",
        "context_full": "train",
        "tool_error": "mask",
        "environment_error": "mask",
        "timeout": "mask",
        "cancelled": "mask",
        "agent_error": "mask",
    }


@section
class MultiTurnConfig(BaseConfig):
    """Conversations of several turns, with tools and simulated users."""

    hydra_target: ClassVar[str] = "verl.workers.config.MultiTurnConfig"

    enable: bool = setting(False)
    """Answer prompts whose row has no `agent_name` by `tool_agent`, or by `agent.default_agent_loop`."""
    max_assistant_turns: int | None = setting(None, ge=1)
    """Maximum number of turns of the policy in a conversation; null is no limit."""
    max_user_turns: int | None = setting(None, ge=1)
    """Maximum number of turns of tools and simulated users in a conversation; null is no limit."""
    max_parallel_calls: int = setting(1, ge=1)
    """Maximum number of tool calls that are executed in one turn; further ones are rejected."""
    max_tool_response_length: int = setting(256, ge=1)
    """Maximum length of the result of a tool call, in tokens; longer results are cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = setting("middle")
    """Part of a longer result that is kept: `left` its beginning, `right` its end, `middle` both."""
    malformed_call_penalty: float = setting(0.0, ge=0)
    """Penalty on the score for each malformed tool call, on the turn that wrote it."""
    tool_config_path: ClassEntries = setting(None, path=True)
    """YAML file of the tools, or their list: `class_name`, `config` and `tool_schema` of each."""
    function_tool_path: str | None = setting(None, path=True)
    """Python file whose typed functions with `@function_tool` are tools."""
    interaction_config_path: ClassEntries = setting(None, path=True)
    """YAML file of the simulated users, or their list: `name`, `class_name` and `config` of each; rows choose one by
    `interaction_kwargs.name`."""
    environment_config_path: ClassEntries = setting(None, path=True)
    """YAML file of the environments, or their list: `name`, `class_name` and `config` of each; rows choose one by
    `environment_kwargs.name`."""
    format: str = setting("hermes")
    """Format in which the model writes tool calls."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = setting("strict")
    """Comparison of a conversation's tokens with those of its text when rendered at once; differences are counted."""
    use_inference_chat_template: bool = setting(False)
    """Let the chat template rewrite history between turns, as a server with the OpenAI protocol would; a rewritten
    history starts another training sequence. If false, sampled tokens never change."""


@section
class CustomAsyncServerConfig(BaseConfig):
    """A class of servers of one's own, which this version does not have."""

    hydra_target: ClassVar[str] = "verl.workers.config.CustomAsyncServerConfig"

    path: str | None = setting(None)
    """Must be null: a program that answers prompts is an agent loop here, `agent_loop_config_path`."""
    name: str | None = setting(None)
    """Must be null, as `path`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """There are no servers of one's own."""
        for key in ("path", "name"):
            if self[key] is not None:
                cause = "custom servers are not in this version"
                remedy = "write an agent loop (agent.agent_loop_config_path) instead"
                yield Problem(f"{path}.{key}", self[key], cause, "null", remedy)


@section
class AgentLoopConfig(BaseConfig):
    """Agent loops: the programs that answer prompts."""

    hydra_target: ClassVar[str] = "verl.workers.config.AgentLoopConfig"

    num_workers: int = setting(8, ge=1)
    """Processes that run agent loops, at most one per core; with `trainer.controller=local` the trainer's process runs
    them."""
    default_agent_loop: str = setting(SINGLE_TURN)
    """Agent loop for prompts whose row names none."""
    agent_loop_config_path: str | None = setting(None, path=True)
    """YAML file of your own agent loops: `name`, `_target_`, and further arguments of each."""
    custom_async_server: CustomAsyncServerConfig = subsection(CustomAsyncServerConfig)
    """Servers of one's own; there are none here."""
    max_concurrent: int = setting(256, ge=1)
    """Maximum number of trajectories that one process runs at once; each has its own thread."""
    trajectory_timeout_s: float = setting(1800.0, gt=0)
    """Time limit of a trajectory, in seconds; time in which it waits for engines that sleep does not count."""
    tool_timeout_s: float = setting(60.0, gt=0)
    """Time limit of one call of a tool, a simulated user or an environment, in seconds."""
    hang_timeout_s: float = setting(120.0, gt=0)
    """Seconds without any answer after which a process of agent loops counts as hung (stopped, or its code holds
    Python's lock); it is then replaced, and its unfinished trajectories run again."""
    max_failure_rate: float = setting(0.5, ge=0, le=1)
    """Maximum share of a step's trajectories that may fail and be left out; above it the run ends."""
    on_failure: dict[TrajectoryStatus, OnFailure] = setting(factory=_on_failure)
    """Treatment of trajectories by their status: `train` trains on them; `mask` leaves them out; `zero` sets their
    score to 0; `redraw` samples them again, up to twice, and then leaves them out. Statuses that are not listed keep
    their default."""

    def problems(self, path: str) -> Iterator[Problem]:
        """A trajectory that is done is trained on."""
        if self.on_failure.get("done", "train") != "train":
            cause = "a trajectory that is done did not fail"
            yield Problem(f"{path}.on_failure.done", self.on_failure["done"], cause, "train, or leave it out")

    def treatment_of(self, status: TrajectoryStatus) -> OnFailure:
        """Return what becomes of trajectories with this status."""
        return self.on_failure.get(status) or _on_failure().get(status, "train")
