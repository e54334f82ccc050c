"""A user played by a language model behind an OpenAI-compatible chat-completions endpoint.

::

    interaction:
      - name: customer
        class_name: verl.interactions.openai_interaction.OpenAIInteraction
        config:
          base_url: http://localhost:8000/v1
          model: Qwen/Qwen3-8B
          system_prompt: "You are a customer. You want: {goal} Say ###STOP### when you have it."

The model sees the conversation with the roles exchanged: what the policy said comes from its user, what the user said
is its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl.base import env
from verl.base.http_limits import UNCOMPRESSED, answer_limit
from verl.base.registry import suggest
from verl.base.requirements import install_command
from verl.base.types import JsonObject
from verl.errors import ConfigError, RolloutError
from verl.interactions.base import BaseInteraction
from verl.scorers.llm_judge import CONTROL_TOKEN
from verl.tools.threads import in_thread

if TYPE_CHECKING:
    import openai

OTHER_SIDE = {"user": "assistant", "assistant": "user"}
"""The model that plays the user sees its own messages as the assistant's."""
BEGINNING = "The conversation begins. Say what you want."  # many chat templates demand that the user speaks first
JUDGE = "reward_router_address"
FIELD = re.compile(r"\{(\w+)\}")
"""A field of the system prompt or of the address, filled from the row."""
SHOWN = 500
"""Longest part of an error of the endpoint in a message, in characters."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and sampling settings of the user's model: ``config`` of the YAML file."""

    base_url: str
    """With ``http://{reward_router_address}/v1`` the judge of the run plays the user."""
    model: str
    system_prompt: str
    """Role that the model plays. ``{key}`` stands for that value of the row's ``interaction_kwargs``."""
    end_marker: str = "###STOP###"
    """The conversation ends where the reply holds this."""
    api_key_env: str | None = None
    """Environment variable with the key; None for a server that needs none."""
    temperature: float | None = None
    max_tokens: int | None = 512
    timeout_s: float = 60.0
    """Time of one attempt."""
    max_retries: int = 3
    extra_body: Mapping[str, object] | None = None
    """Further fields of a request."""

    def __post_init__(self) -> None:
        if not str(self.base_url).startswith(("http://", "https://")):
            raise ConfigError(f"base_url='{self.base_url}' must begin with http:// or https://.")
        if not self.model or not self.end_marker:
            raise ConfigError(f"model='{self.model}' and end_marker='{self.end_marker}' must not be empty.")
        if self.timeout_s <= 0 or self.max_retries < 0:
            raise ConfigError(
                f"timeout_s={self.timeout_s} must be positive and max_retries={self.max_retries} at least 0."
            )


class OpenAIInteraction(BaseInteraction):
    """Let a language model play the user. It gives no scores: the reward function scores the conversation.

    Raises:
        ConfigError: a setting is missing or wrong, or the package ``openai`` is not installed.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        settings = {key: value for key, value in config.items() if key != "name"}
        names = [field.name for field in fields(Endpoint)]
        self.asks_judge = f"{{{JUDGE}}}" in str(settings.get("base_url"))
        for key in settings:
            if key not in names:
                raise ConfigError(f"unknown key '{key}'.{suggest(key, names)} Known: {', '.join(names)}.")
        if missing := [key for key in ("base_url", "model", "system_prompt") if key not in settings]:
            raise ConfigError(f"config has no {', '.join(missing)}.")
        self.endpoint = Endpoint(**settings)
        name = self.endpoint.api_key_env
        self._key = env.secret(name, "api_key_env") if name else None
        self._client  # noqa: B018 - here, so that a missing package is an error before the run

    @cached_property
    def _client(self) -> openai.OpenAI:
        """One for all threads: its TLS context is slow to build."""
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ConfigError(f"a user behind an endpoint needs openai: {install_command('agents')}.") from error
        end = self.endpoint
        return openai.OpenAI(
            base_url=end.base_url,
            api_key=self._key or "none",
            timeout=end.timeout_s,
            max_retries=end.max_retries,
            default_headers=UNCOMPRESSED,
            http_client=openai.DefaultHttpxClient(event_hooks=answer_limit()),
        )

    async def generate_response(
        self, instance_id: str, messages: list[JsonObject], **kwargs: object
    ) -> tuple[bool, str, float | None, JsonObject]:
        """Ask the model what the user says.

        Raises:
            RolloutError: it does not answer, with all attempts.
        """
        end = self.endpoint
        options = {"max_tokens": end.max_tokens, "temperature": end.temperature, "extra_body": end.extra_body}
        base_url = FIELD.sub(lambda match: str(kwargs[match[1]]), end.base_url) if self.asks_judge else end.base_url
        reply = await in_thread(
            self._request_reply,
            base_url,
            model=end.model,
            messages=[{"role": "system", "content": self._instructions(kwargs)}, *_swap_roles(messages)],
            **{name: value for name, value in options.items() if value is not None},
        )
        text, marker, _ = reply.partition(end.end_marker)
        return bool(marker), text.strip(), None, {}

    def _request_reply(self, base_url: str, **request: Any) -> str:
        import openai

        client = self._client.with_options(base_url=base_url) if self.asks_judge else self._client
        try:
            reply = client.chat.completions.create(**request)
        except openai.OpenAIError as error:
            what = f"{type(error).__name__}: {error}"
            what = what.replace(self._key, "***") if self._key else what
            where = f"{base_url} did not answer for model '{self.endpoint.model}'"
            raise RolloutError(f"{where}. {what:.{SHOWN}}") from None  # the cause may hold the key
        choices = getattr(reply, "choices", None)  # the library does not check what it receives
        text = choices[0].message.content if choices else None
        if not isinstance(text, str):
            raise RolloutError(f"{base_url} sent no text: {reply!r:.{SHOWN}}")
        return text

    def _instructions(self, values: Mapping[str, object]) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                names = ", ".join(values) or "nothing"
                raise ConfigError(
                    f"system_prompt has {{{match[1]}}}, but interaction_kwargs of the row has no '{match[1]}'; it has "
                    f"{names}."
                )
            return str(values[match[1]])

        return FIELD.sub(value, self.endpoint.system_prompt)


def _swap_roles(messages: list[JsonObject]) -> list[dict[str, str]]:
    """Return the conversation as the user sees it, without calls, results of tools and the policy's instructions.

    Roles alternate, and the user's comes first, as many chat templates demand. Control tokens of common templates are
    broken up, so that the policy cannot write the user's part.
    """
    seen = [{"role": "user", "content": BEGINNING}]
    for message in messages:
        role, text = OTHER_SIDE.get(message["role"]), message.get("content") or ""
        if isinstance(text, list):  # an image is only named
            text = "".join(part.get("text") or f"[{part['type']}]" for part in text)
        if not (role and text):
            continue
        text = CONTROL_TOKEN.sub(r"\g<0> ", text)
        if seen[-1]["role"] == role:
            seen[-1]["content"] += f"\n\n{text}"
        else:
            seen.append({"role": role, "content": text})
    return seen
