"""Answers with fields, for which kits force a call of one tool."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tests.plugins.endpoint.kits.text_programs import model_of

ROOM = {"prompt_length": 4000, "response_length": 4000}


class Sum(BaseModel):
    """A sum."""

    number: int
    note: str


FIELDS = ' {"number": 42, "note": "of two"}}\n</tool_call>'


def test_langchain_forces_a_call_with_the_fields(serve):
    pytest.importorskip("langgraph", reason="langgraph is not installed: make test-agent-kits")
    from langchain_openai import ChatOpenAI

    def script(prompt):
        assert prompt.endswith('<tool_call>\n{"name": "Sum", "arguments":')
        return FIELDS

    trajectory = serve(script, **ROOM)
    access = trajectory.access
    model = ChatOpenAI(model="policy", base_url=access.base_url, api_key=access.api_key)
    answer = model.with_structured_output(Sum, method="function_calling").invoke("40 + 2?")
    assert answer == Sum(number=42, note="of two")
    assert trajectory.texts()[0][1] == [FIELDS]  # parallel_tool_calls=false: the turn ends with the call


@pytest.mark.parametrize("form", ["chat", "responses", "anthropic"])
def test_pydantic_ai_forces_a_call_with_the_fields(serve, form):
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-agent-kits")
    from pydantic_ai import Agent

    def script(prompt):
        assert prompt.endswith('<tool_call>\n{"name": "final_result", "arguments":')
        return FIELDS

    trajectory = serve(script, **ROOM)
    agent = Agent(model_of(form, trajectory.access), output_type=Sum)
    assert agent.run_sync("40 + 2?").output == Sum(number=42, note="of two")
    assert trajectory.texts()[0][1] == [f"{FIELDS}<|im_end|>"]
