"""Tokens of single turns that are under way, for checkpoints."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agents.manager import AgentLoopManager
from verl.agents.partial_responses import SingleTurn
from verl.protocol import DataProto
from verl.tools.threads import LoopThread
from verl.workers.rollout.request import FinishReason, RolloutOutput, RolloutRequest, SamplingParams

NO_CONNECTION: Any = None


@pytest.mark.parametrize(("begun", "ended"), [("abort", "length"), ("length", "length"), ("stop", "stop")])
def test_a_response_as_long_as_the_limit_that_was_lowered_since_ends_by_length(
    begun: FinishReason, ended: FinishReason
) -> None:
    turn = SingleTurn(NO_CONNECTION, RolloutOutput([5, 6], [-1.0, -2.0], begun, weight_version=3))
    response = turn.send("turn", RolloutRequest([9], SamplingParams(max_tokens=2, seed=0))).future().result()
    assert (response.token_ids, response.finish_reason) == ([5, 6], ended)
    assert turn.partial_response({}) == response


def test_a_checkpoint_while_the_router_is_lost_has_no_tokens() -> None:
    """Another thread notices the loss, and cancels what runs in the event loop."""
    thread = LoopThread("agents")

    async def partial_responses() -> list[DataProto]:
        thread.clear(lambda _: None)
        await asyncio.sleep(60)
        return []

    manager: Any = SimpleNamespace(_agents=SimpleNamespace(thread=thread, partial_responses=partial_responses))
    assert AgentLoopManager.partial_responses(manager) == []
    thread.stop()
