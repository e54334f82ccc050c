"""pydantic-ai, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

import pytest

from tests.agents.endpoint.kits.conftest import believed, recorded, result, said, user

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-agent-kits")


def model_of(form, access):
    if form == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("policy", provider=AnthropicProvider(base_url=access.root, api_key=access.api_key))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if form == "chat" else OpenAIResponsesModel
    return kind("policy", provider=OpenAIProvider(base_url=access.base_url, api_key=access.api_key))


@pytest.mark.parametrize("form", ["chat", "responses", "anthropic"])
def test_an_agent_with_a_tool(calculator, form):
    from pydantic_ai import Agent

    agent = Agent(model_of(form, calculator.access), system_prompt="Use the tool.")

    @agent.tool_plain
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    done = agent.run_sync("2*21?")
    assert done.output == "It is 42."
    messages = []
    for message in done.all_messages():
        texts = [part.content for part in message.parts if part.part_kind == "text"]
        calls = [
            (part.tool_call_id, part.tool_name, part.args_as_dict())
            for part in message.parts
            if part.part_kind == "tool-call"
        ]
        if message.kind == "response":
            messages.append(said("".join(texts), *calls))
        for part in message.parts:
            if part.part_kind == "user-prompt":
                messages.append(user(part.content))
            elif part.part_kind == "tool-return":
                messages.append(result(part.tool_call_id, str(part.content)))
    assert recorded(calculator) == [believed(messages)]
