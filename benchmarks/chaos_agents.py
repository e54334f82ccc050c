"""The agent loop of chaos.py: it answers in two turns, between which processes may die."""

from __future__ import annotations

from typing import Any

from verl.agents.loop import AgentLoopBase, AgentLoopOutput

FIRST_TOKENS = 4


class TwoTurns(AgentLoopBase):
    """Draws a few tokens, and then the rest."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`."""
        prompt, ids = kwargs["raw_prompt_ids"], []
        for most in (FIRST_TOKENS, self.rollout_config.response_length - FIRST_TOKENS):
            params = {**sampling_params, "max_tokens": most}
            drawn = await self.server_manager.generate("a", prompt_ids=prompt + ids, sampling_params=params)
            ids += drawn.token_ids
            if drawn.stop_reason == "stop":
                break
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), num_turns=2)
