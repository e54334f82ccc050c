"""langgraph with langchain-openai."""

from __future__ import annotations

import pytest

from tests.agents.endpoint.kits.conftest import believed, recorded, result, said, user

pytest.importorskip("langgraph", reason="langgraph is not installed: make test-agent-kits")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-agent-kits")


@pytest.mark.parametrize("settings", [{}, {"use_responses_api": True}, {"streaming": True}])
def test_a_react_agent(calculator, settings):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    access = calculator.access
    model = ChatOpenAI(model="policy", base_url=access.base_url, api_key=access.api_key, **settings)
    state = create_react_agent(model, [double], prompt="Use the tool.").invoke({"messages": [("user", "2*21?")]})
    messages = []
    for message in state["messages"]:
        if message.type == "human":
            messages.append(user(message.text))
        elif message.type == "tool":
            messages.append(result(message.tool_call_id, message.text))
        else:
            calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
            messages.append(said(str(message.text), *calls))
    assert messages[-1]["content"] == "It is 42."
    assert recorded(calculator) == [believed(messages)]
