"""The interface of a tool."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class ToolTimeoutError(TimeoutError):
    """A tool's own limit of time was reached; the call counts as one that took too long."""


class BaseTool:
    """A tool. One object serves all trajectories of a process, whose state it keeps by ``instance_id``.

    A trajectory calls ``create`` before its first call, ``execute`` for every call, and at its end ``calc_reward`` and
    ``release``. All of them run in a thread that is this trajectory's until its end: blocking code delays no other.
    Keep no object of asyncio (a lock, a session) in the tool itself, for each thread has an event loop of its own.

    A class that sets ``never_blocks`` runs in the event loop of all trajectories instead, which saves two changes of
    threads a call. It promises that its methods compute for less than a few milliseconds, or ``await``. The promise
    holds for the class that makes it, not for those that inherit from it.

    Args:
        config: the tool's ``config`` in the YAML file.
        tool_schema: the description for the model, or None if :meth:`get_openai_tool_schema` makes it.

    Raises:
        ConfigError: there is no description.
    """

    never_blocks: ClassVar[bool] = False

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ConfigError(
                f"the tool {type(self).__name__} has no description. Give it a tool_schema in the YAML file, or "
                "override get_openai_tool_schema."
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the description for the model."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        """Prepare the tool for one trajectory.

        Args:
            instance_id: name of the trajectory's state; None draws one.
            **kwargs: ``create_kwargs``, the values of the row under ``tools_kwargs[name]["create_kwargs"]``.

        Returns:
            The name of the state, and a response, which is not used.
        """
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float | None, JsonObject | None]:
        """Answer one call.

        Args:
            instance_id: name of the trajectory's state.
            parameters: arguments of the call, which fit the description.
            **kwargs: ``agent_data``, where the loop has it.

        Returns:
            The response, the reward of this call, and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute().")

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """Return the reward of the trajectory's state at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """Release the resources that :meth:`create` acquired."""

    def close(self) -> None:
        """Release the tool's own resources, such as connections and processes; the tool is not called afterwards."""


def created_with(kwargs: JsonObject) -> JsonObject:
    """Return the row's values from the keyword arguments of ``create``: given as such, or under ``create_kwargs``."""
    arguments = {key: value for key, value in kwargs.items() if key != "create_kwargs"}
    return {**arguments, **(kwargs.get("create_kwargs") or {})}


def schema(name: str, description: str, required: list[str], **properties: JsonObject) -> OpenAIFunctionToolSchema:
    """Make the description of a tool."""
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
