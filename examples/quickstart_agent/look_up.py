"""The tool: one cell of the row's secret table."""

from __future__ import annotations

from typing import Any

from examples.quickstart_agent import task
from verl.tools.base_tool import BaseTool, created_with, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class LookUp(BaseTool):
    """Answers ``look_up(person, relation)`` from the table that the row names in ``create_kwargs``."""

    never_blocks = True

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._tables: dict[str, int] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        text = {"type": "string"}
        return schema(
            task.TOOL,
            "Who is the friend, teacher, ... of a person.",
            ["person", "relation"],
            person=text,
            relation=text,
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Remember the number of the row's table."""
        instance_id, response = await super().create(instance_id)
        self._tables[instance_id] = int(created_with(kwargs)["table"])
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Return the cell."""
        return ToolResponse(text=task.look_up(self._tables[instance_id], **parameters)), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the table."""
        del self._tables[instance_id]
