"""Read the JSON body of a call, and name the parameter that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from verl.base.types import JsonMapping, JsonObject
from verl.datasets.chat import Message, as_messages
from verl.errors import DataError
from verl.plugins.endpoint.calls import CallRefusedError
from verl.vision.data_urls import base64_of
from verl.vision.messages import has_image_parts, has_video_parts, with_images, without_images

Request = TypeVar("Request", bound="CallBody")
StrictNumber = StrictFloat | StrictInt

NO_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "stream_options", "betas", "inference_geo"),
    }
)
"""Parameters that change nothing of an answer's tokens."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "echo": (False,),
    "best_of": (1,),
    "thinking": ({"type": "disabled"},),
}
"""Values of further parameters that change nothing."""


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages, and what chat templates call them."""
NOT_SHOWN = ("refusal", "function_call", "audio")
"""Fields of an assistant's message at OpenAI that no chat template writes."""
WITH_IMAGES = ("user", "tool")
"""Roles whose messages may have images."""


class CallBody(BaseModel):
    """Fields that the bodies of all requests share."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=200)
    stream: StrictBool | None = None
    temperature: StrictNumber | None = Field(None, ge=0)
    top_p: StrictNumber | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = None
    min_p: StrictNumber | None = Field(None, ge=0, le=1)

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that the client named."""
        named = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return {name: value for name, value in named.items() if value is not None}

    def unmet(self) -> dict[str, str]:
        """Parameters that are not kept, and why."""
        return {
            name: _not_kept(name, value)
            for name, value in (self.model_extra or {}).items()
            if value is not None and name not in NO_EFFECT and value not in NEUTRAL.get(name, ())
        }


def _not_kept(name: str, value: object) -> str:
    if name not in NEUTRAL:
        return f"the endpoint does not know this parameter (its value is {value!r:.100})."
    allowed = " or ".join(map(repr, NEUTRAL[name]))
    return f"{value!r:.100} is not kept. Leave it out, or send what changes nothing: {allowed}."


def read_body(form: type[Request], body: Mapping[str, object]) -> Request:
    """Check the body of a request.

    Raises:
        CallRefusedError: a parameter is missing or has a wrong value.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f", not {first['input']!r:.100}"
        name = str(first["loc"][0]) if first["loc"] else None
        raise CallRefusedError(f"{where}: {first['msg']}{value}.", param=name, code="invalid_value") from error


def checked_messages(messages: Sequence[object], param: str) -> list[Message]:
    """Check messages and return what a chat template needs of each: role, content, calls, and which call is answered.

    Contents may have image parts with ``data:`` URLs, which become ``{"type": "image", "image": URL}``.

    Raises:
        CallRefusedError: they cannot be used.
    """
    try:
        checked = [_checked_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]
        bare, images = without_images(checked)
        urls = [{"image": _data_url(image, param)} for image in images]
        read = with_images(as_messages(bare, param, with_images=True), urls)
    except DataError as error:
        raise CallRefusedError(str(error), param=param, code="invalid_value") from error
    if read[-1]["role"] == "assistant":
        raise CallRefusedError(
            f"{param}: the last message is the assistant's. The model writes whole turns, so end with a message of "
            "another role.",
            param=param,
            code="invalid_value",
        )
    names = {call["id"]: call["function"]["name"] for message in read for call in message.get("tool_calls", ())}
    return [
        message | {"name": names.get(message["tool_call_id"], "unknown")} if message["role"] == "tool" else message
        for message in read
    ]


def _data_url(image: object, where: str) -> str:
    """The ``data:`` URL of an image part of ``chat/completions``."""
    image_url = image.get("image_url") if isinstance(image, Mapping) else None
    url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
    if not isinstance(url, str):
        raise DataError(
            f"{where}: an image part has {image_url!r:.100}. Expected {{'type': 'image_url', 'image_url': {{'url': "
            "'data:image/png;base64,...'}}."
        )
    base64_of(url, where)  # it is one
    return url


def image_part(url: object) -> JsonObject:
    """Return the part of ``chat/completions`` for an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def joined_parts(parts: Sequence[JsonMapping]) -> str | list[JsonMapping]:
    """Return the content of a message with parts: its text, or the parts if there is an image among them."""
    return list(parts) if has_image_parts(list(parts)) else "".join(part["text"] for part in parts)


def unmet_detail(details: Iterable[object]) -> dict[str, str]:
    """Return what ``unmet`` says of the ``detail`` of images, which are as large as the image processor allows."""
    other = next((detail for detail in details if detail not in (None, "auto", "high", "original")), None)
    reason = f"{other!r:.100} asks for images of another size than the policy's image processor makes."
    return {} if other is None else {"detail": reason}


def forced_by(choice: object, tools: Sequence[str]) -> tuple[str, ...]:
    """Return the tools that an OpenAI client's ``tool_choice`` requires: one of them must be called.

    Raises:
        CallRefusedError: there is no such tool.
    """
    if choice == "required":
        return tools_to_call(tools)
    name = _named_function(choice)
    return () if name is None else tools_to_call(tools, name)


def tools_to_call(tools: Sequence[str], name: str | None = None) -> tuple[str, ...]:
    """Return the names of the tools of which one must be called: the named one, or all.

    Raises:
        CallRefusedError: there is no such tool.
    """
    if not tools or name not in (None, *tools):
        wish = "a tool" if name is None else f"{name!r:.100}"
        raise CallRefusedError(
            f"tool_choice: {wish} is to be called, and the tools of the request are {', '.join(tools) or 'none'}.",
            param="tool_choice",
            code="invalid_value",
        )
    return tuple(tools) if name is None else (name,)


def unmet_choice(choice: object) -> dict[str, str]:
    """Return what ``unmet`` says of an OpenAI client's ``tool_choice``."""
    if choice in (None, "auto", "none", "required") or _named_function(choice) is not None:
        return {}
    reason = f"{choice!r:.100} is not kept. Send 'auto', 'none', 'required' or one function."
    return {"tool_choice": reason}


def _named_function(choice: object) -> str | None:
    """The name in ``{"type": "function", "name": ...}``, which ``chat/completions`` nests in ``function``."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def unmet_names(messages: Iterable[Any]) -> dict[str, str]:
    """Return what ``unmet`` says of names of those who speak; the assistant's and those of tools are known anyway."""
    for index, message in enumerate(messages):
        name = message.get("name") if isinstance(message, Mapping) else None
        if name and message.get("role") not in ("assistant", "tool"):
            reason = f"messages[{index}] has {name!r:.100}, which the policy would not see: write it into the content."
            return {"name": reason}
    return {}


def _checked_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {message!r:.100}. Expected an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where}.role is {role!r:.100}. Expected one of {', '.join(ROLES)}.")
    if ROLES[role] not in WITH_IMAGES and has_image_parts(message.get("content")):
        raise DataError(f"{where} of the role {role} has an image. Those of {' and '.join(WITH_IMAGES)} may have some.")
    content = message.get("content")
    if has_video_parts(content):
        raise DataError(f"{where} has a video, and the endpoint takes texts and images. Send frames as images.")
    checked: Message = {
        "role": ROLES[role],
        "content": "" if role == "assistant" and content in (None, []) else content,
    }
    if role == "tool":
        checked["tool_call_id"] = _text(message, "tool_call_id", where)
    for key in NOT_SHOWN if role == "assistant" else ():
        if message.get(key) is not None:
            raise DataError(
                f"{where}.{key} is {message[key]!r:.100}, which the policy would not see. An assistant's message has "
                "content and tool_calls."
            )
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls not in (None, []):
        if not isinstance(calls, list):
            raise DataError(f"{where}.tool_calls is {calls!r:.100}. Expected a list.")
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return checked


def _call(call: Any, where: str) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise DataError(f"{where} is {call!r:.100}. Expected an object with id and function.")
    return {
        "id": _text(call, "id", where),
        "type": "function",
        "function": {name: _text(function, name, f"{where}.function") for name in ("name", "arguments")},
    }


def _text(value: JsonMapping, key: str, where: str) -> str:
    if not isinstance(value.get(key), str):
        raise DataError(f"{where}.{key} is {value.get(key)!r:.100}. Expected a text.")
    return value[key]
