"""The training sequences of a conversation, as an agent loop returns them."""

from __future__ import annotations

from verl.agents.conversation import Conversation
from verl.agents.loop import AgentLoopMetrics, AgentLoopOutput
from verl.base.types import JsonObject
from verl.config.agent import TrajectoryStatus


def without_tokens(output: AgentLoopOutput) -> AgentLoopOutput:
    """Return a sequence without its tokens, for a process that does not need them."""
    tokens = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "weight_versions")
    return output.model_copy(update={**{name: [] for name in tokens}, "routed_experts": None, "kept_ids": None})


def conversation_outputs(
    conversation: Conversation,
    *,
    status: TrajectoryStatus,
    metrics: AgentLoopMetrics,
    messages: list[JsonObject],
    turn_scores: list[float] | None,
    turn_rewards: list[float] | None = None,
    columns: JsonObject,
) -> AgentLoopOutput | list[AgentLoopOutput]:
    """Make an output of each sequence of a conversation: one, unless the template rewrote history.

    Args:
        conversation: at its end.
        status: how it ended.
        metrics: of the whole trajectory.
        messages: the conversation, for the dumps.
        turn_scores: a score for each turn of the policy; each sequence gets those of its own turns.
        turn_rewards: what is added to the score, of each turn of the policy.
        columns: further values of the whole trajectory. These, the metrics and ``told`` are the last sequence's.

    Returns:
        a list only if there are several, as subclasses of the loops expect.
    """
    outputs: list[AgentLoopOutput] = []
    done = 0
    for written in conversation.sequences:
        num_turns = sum(turn.role == "assistant" for turn in written.turns)
        if not num_turns and outputs:
            continue  # history was rewritten, and then there was no room for a turn
        scores = None if turn_scores is None else turn_scores[done : done + num_turns]
        added = None if turn_rewards is None else turn_rewards[done : done + num_turns]
        if turn_rewards is not None and turn_scores is None and len(conversation.sequences) > 1:
            # All sequences share the score, so they share what is added to it.
            added = [*[0.0] * (num_turns - 1), sum(turn_rewards)][:num_turns]
        done += num_turns
        outputs.append(
            AgentLoopOutput(
                prompt_ids=written.prompt_ids,
                response_ids=written.response_ids,
                response_mask=written.response_mask,
                response_logprobs=written.response_logprobs,
                num_turns=len(conversation.messages),
                extra_fields={"turn_scores": scores, "turn_rewards": added},
            )
        )
    last = outputs[-1]
    more = {"status": status, "metrics": metrics, "conversation": messages, "extra_fields": last.extra_fields | columns}
    outputs[-1] = last.model_copy(update=more)
    return outputs if len(outputs) > 1 else outputs[0]
