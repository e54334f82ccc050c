"""Configuration of conversations: agent loops, their tools and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from verl.config.base import BaseConfig, section, setting
from verl.config.problems import Problem

SINGLE_TURN = "single_turn_agent"
TrajectoryStatus = Literal[
    "done", "turns_used_up", "context_full", "tool_error", "environment_error", "timeout", "cancelled", "agent_error"
]
"""How a trajectory ended: by itself; at a limit of turns or of tokens; because a tool, its environment, or the agent's
own code failed; because it took too long; or because somebody cancelled it."""

ClassEntries = str | tuple[dict[str, Any], ...] | None
"""Path of a YAML file that lists classes with their settings, or the list."""

OnFailure = Literal["train", "mask", "zero", "redraw"]
"""What becomes of a trajectory with some status: it is trained on; it is left out; it is trained on with score 0; it is
drawn again, and left out if that fails too."""


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
    """Answer prompts whose row names no `agent_name` by `tool_agent`, or as `agent.default_agent_loop` says."""
    max_assistant_turns: int | None = setting(None, ge=1)
    """Most turns of the policy in a conversation; null sets no limit."""
    max_user_turns: int | None = setting(None, ge=1)
    """Most turns of tools and simulated users in a conversation; null sets no limit."""
    max_parallel_calls: int = setting(1, ge=1)
    """Most tool calls of one turn that are carried out; further ones are left out."""
    max_tool_response_length: int = setting(256, ge=1)
    """Longest result of one tool call, in tokens; longer ones are cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = setting("middle")
    """What is kept of a longer result: `left` its beginning, `right` its end, `middle` both."""
    malformed_call_penalty: float = setting(0.0, ge=0)
    """What each tool call that cannot be read takes from the score, on the turn that wrote it."""
    tool_config_path: ClassEntries = setting(None, path=True)
    """YAML file with the tools, or their list: `class_name`, `config` and `tool_schema` of each."""
    function_tool_path: str | None = setting(None, path=True)
    """Python file whose typed functions under `@function_tool` are tools."""
    interaction_config_path: ClassEntries = setting(None, path=True)
    """YAML file with the simulated users, or their list: `name`, `class_name` and `config` of each; rows choose one by
    `interaction_kwargs.name`."""
    environment_config_path: ClassEntries = setting(None, path=True)
    """YAML file with the environments, or their list: `name`, `class_name` and `config` of each; rows choose one by
    `environment_kwargs.name`."""
    format: str = setting("hermes")
    """Format in which the model writes tool calls."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = setting("strict")
    """How the tokens of a conversation are compared with its whole text, rendered at once; differences are counted."""
    use_inference_chat_template: bool = setting(False)
    """Let the chat template rewrite history between turns, as a server of the OpenAI protocol would; what is rewritten
    begins another training sequence. If false, what the policy drew stays as it is."""


@section
class AgentLoopConfig(BaseConfig):
    """Agent loops: the programs that answer prompts."""

    hydra_target: ClassVar[str] = "verl.workers.config.AgentLoopConfig"

    num_workers: int = setting(8, ge=1)
    """Processes in which agent loops run, at most one for each core; with `trainer.controller=local` they run in the
    trainer's own."""
    default_agent_loop: str = setting(SINGLE_TURN)
    """Agent loop of prompts whose row names none."""
    agent_loop_config_path: str | None = setting(None, path=True)
    """YAML file with agent loops of your own: `name`, `_target_`, and further arguments of each."""
    max_concurrent: int = setting(256, ge=1)
    """Most trajectories that one process runs at once; each has a thread of its own."""
    trajectory_timeout_s: float = setting(1800.0, gt=0)
    """Longest time of one trajectory, in seconds."""
    tool_timeout_s: float = setting(60.0, gt=0)
    """Longest time of one call of a tool, of a simulated user or of an environment, in seconds."""
    hang_timeout_s: float = setting(120.0, gt=0)
    """Longest time in which a process of agent loops answers nothing, in seconds, as one that is stopped or whose code
    holds Python's lock; it is then replaced, and what it had begun runs again."""
    max_failure_rate: float = setting(0.5, ge=0, le=1)
    """Largest share of the trajectories of a step that may fail and be left out; more end the run."""
    on_failure: dict[TrajectoryStatus, OnFailure] = setting(factory=_on_failure)
    """What becomes of trajectories by their status: `train`; `mask` leaves them out; `zero` gives them the score 0;
    `redraw` draws them again, up to twice, and then leaves them out. Statuses that are not named keep their default."""

    def problems(self, path: str) -> Iterator[Problem]:
        """A trajectory that is done is trained on."""
        if self.on_failure.get("done", "train") != "train":
            cause = "a trajectory that is done did not fail"
            yield Problem(f"{path}.on_failure.done", self.on_failure["done"], cause, "train, or leave it out")

    def treatment_of(self, status: TrajectoryStatus) -> OnFailure:
        """Return what becomes of trajectories with this status."""
        return self.on_failure.get(status) or _on_failure().get(status, "train")
