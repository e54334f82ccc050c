"""Description of a tool for a model, a call of it, and its answer, in the forms of OpenAI's chat completions."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.base.types import JsonObject


class OpenAIFunctionPropertySchema(BaseModel):
    """JSON schema of a parameter; keys that are not listed here (``items``, ``minimum``, ``anyOf``) are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[object] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """JSON schema of all parameters together, an object."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function: its name, what it does, and its parameters."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as chat templates take it: :meth:`to_template`."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def to_template(self) -> JsonObject:
        """Return the dict that a chat template renders: only what was set."""
        schema = self.model_dump(exclude_unset=True, exclude_none=True)
        return {"type": self.type, **schema}


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a model wrote it: ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments are read."""

    name: str
    arguments: JsonObject

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Read the arguments of a call from their JSON text.

        Returns:
            the call, and whether the text is no JSON object; the call then has no arguments.
        """
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_object = isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments if is_object else {})
        return call, not is_object


class OpenAIFunctionToolCall(BaseModel):
    """A call in a message of the assistant."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Answer of a tool: text, images, videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[object] | None = None

    @model_validator(mode="before")
    @classmethod
    def initialize_request(cls, values: object) -> object:
        """Check that images and videos are lists."""
        for key in ("image", "video"):
            if isinstance(values, dict) and not isinstance(values.get(key), list | None):
                raise ValueError(f"{key} must be a list, not {type(values[key]).__name__}: write {key}=[...].")
        return values

    def is_empty(self) -> bool:
        """Return whether there is no text, no image and no video."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Return whether there is text, and neither image nor video."""
        return bool(self.text) and not self.image and not self.video
