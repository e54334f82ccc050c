"""A tool that takes the answer to a problem of GSM8K."""

from __future__ import annotations

import threading

from verl.base.types import JsonObject
from verl.scorers import gsm8k
from verl.tools.base_tool import BaseTool, created_with, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NOT_BETTER = -0.05
"""Reward of a call whose answer is no better than the one before."""


class Gsm8kTool(BaseTool):
    """Score the answers that a model tries; the trajectory's reward is that of the last one.

    ``create`` takes ``ground_truth``. A call's own reward is 0 if it does better than the call before, else -0.05.
    """

    never_blocks = True

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._lock = threading.Lock()
        self._instance_dict: dict[str, JsonObject] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return self.tool_schema or schema(
            "calc_gsm8k_reward",
            "Check an answer to the problem; it is right if its reward is 1.0.",
            ["answer"],
            answer={"type": "string", "description": "The answer, a number."},
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: object
    ) -> tuple[str, ToolResponse]:
        """Start a trajectory, whose row holds the ``ground_truth``.

        Raises:
            ValueError: the row has none.
        """
        truth = ground_truth if ground_truth is not None else created_with(kwargs).get("ground_truth")
        if truth is None:
            raise ValueError(
                f"no ground_truth: the row needs extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth."
            )
        instance_id, response = await super().create(instance_id)
        with self._lock:
            self._instance_dict[instance_id] = {"response": "", "ground_truth": str(truth), "reward": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float, JsonObject]:
        """Score an answer."""
        answer = str(parameters.get("answer", ""))
        state = self._instance_dict[instance_id]
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        before, state["reward"] = state["reward"], await self.calc_reward(instance_id)
        text = f"The answer was read as {state['response'].removeprefix('#### ')!r}; its reward is {state['reward']}."
        return ToolResponse(text=text), 0.0 if state["reward"] > before else NOT_BETTER, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """Score of the last answer; 0 if there was none."""
        state = self._instance_dict[instance_id]
        return float(gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible"))

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """See :meth:`BaseTool.release`."""
        with self._lock:
            self._instance_dict.pop(instance_id, None)
