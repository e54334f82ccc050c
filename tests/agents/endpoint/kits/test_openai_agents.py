"""openai-agents."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.agents.endpoint.conftest import TOKENIZER
from tests.agents.endpoint.kits.conftest import CALL, LONG, believed, calculates, recorded, result, said, user

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-agent-kits")
openai = pytest.importorskip("openai")
PAGE = Path(__file__).parents[4] / "docs" / "agent_programs.md"


@agents.function_tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@agents.function_tool
def ask_checker(question: str) -> str:
    """Ask."""
    return question


def messages_of(items):
    """The conversation that the kit holds, as messages."""
    messages, calls = [], []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            messages[-1].setdefault("tool_calls", []).append(item)
            calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
            text = messages[-1]["content"]
            messages[-1] = said(text, calls[-1])
        elif kind == "function_call_output":
            messages.append(result(item["call_id"], item["output"]))
        elif item["role"] == "user":
            messages.append(user(item["content"]))
        else:
            messages.append(said("".join(part["text"] for part in item["content"])))
    return messages


@pytest.mark.parametrize("form", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents(calculator, form, is_streamed):
    agents.set_tracing_disabled(True)

    async def run():
        access = calculator.access
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            model = getattr(agents, form)("policy", client)
            agent = agents.Agent("calculator", instructions="Use the tool.", tools=[double], model=model)
            if not is_streamed:
                return await agents.Runner.run(agent, "2*21?")
            streamed = agents.Runner.run_streamed(agent, "2*21?")
            async for _ in streamed.stream_events():
                pass
            return streamed

    done = asyncio.run(run())
    assert done.final_output == "It is 42."
    assert recorded(calculator) == [believed(messages_of(done.to_input_list()))]
    assert [drawn for _, drawn in calculator.texts()] == [[f"Let me see.\n{CALL}<|im_end|>", "It is 42.<|im_end|>"]]


def test_a_hand_over_to_a_sub_agent_is_a_sequence_of_its_own(serve):
    def script(prompt):
        if "You check." in prompt:
            return "It is right."
        return '<tool_call>\n{"name": "transfer_to_checker", "arguments": {}}\n</tool_call>'

    trajectory = serve(script, **LONG)
    agents.set_tracing_disabled(True)

    async def run():
        access = trajectory.access
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            main, sub = (agents.OpenAIChatCompletionsModel(name, client) for name in ("policy", "policy/checker"))
            checker = agents.Agent("checker", instructions="You check.", model=sub)
            return await agents.Runner.run(agents.Agent("main", handoffs=[checker], model=main), "2*21 is 42?")

    assert asyncio.run(run()).final_output == "It is right."
    assert [output.agent for output in trajectory.recorder.outputs()] == ["main", "checker"]
    masked = [drawn for _, drawn in trajectory.texts()]
    assert [len(turns) for turns in masked] == [1, 1]
    assert masked[1] == ["It is right.<|im_end|>"]


def test_the_program_of_the_page(serve):
    from verl.agents.programs import ProgramTask

    [code] = [text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Runner" in text]
    names: dict = {"__name__": "calculator"}
    exec(compile(code, str(PAGE), "exec"), names)
    trajectory = serve(calculates, **LONG)
    access = trajectory.access
    task = ProgramTask(
        messages=[user("2*21?")],
        row={},
        base_url=access.base_url,
        anthropic_base_url=access.root,
        api_key=access.api_key,
    )
    assert asyncio.run(names["answer"](task)) == "It is 42."
    assert recorded(trajectory)[0].endswith("It is 42.<|im_end|>")
    assert TOKENIZER.decode(trajectory.recorder.outputs()[0].prompt_ids).startswith("<|im_start|>system\nUse the tool.")
