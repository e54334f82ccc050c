"""The agent loop of one turn: a prompt and a response."""

from __future__ import annotations

from typing import Any

from verl.agents.images import INPUTS
from verl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.base.types import JsonObject


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Answer the prompt once, with the tokens that ``generate_sequences`` would draw."""

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`."""
        prompt = kwargs["raw_prompt_ids"]
        output = await self.server_manager.generate(
            "turn", prompt_ids=prompt, sampling_params=sampling_params, image_data=kwargs.get(INPUTS)
        )
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=self.server_manager.seconds),
            status="context_full" if output.stop_reason == "length" else "done",
        )
