"""smolagents, which rewrites its history: each call is a sequence."""

from __future__ import annotations

import pytest

from tests.agents.endpoint.kits.conftest import LONG, believed, calculates, recorded

pytest.importorskip("smolagents", reason="smolagents is not installed: make test-agent-kits")


def texts(messages):
    """Messages of the kit as the endpoint gets them."""
    roles = {"tool-call": "assistant", "tool-response": "user"}
    found = []
    for message in messages:
        role = roles.get(
            str(getattr(message.role, "value", message.role)), str(getattr(message.role, "value", message.role))
        )
        content = message.content if isinstance(message.content, str) else "".join(p["text"] for p in message.content)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += "\n" + content
        else:
            found.append({"role": role, "content": content})
    return found


def test_a_code_agent(serve):
    from smolagents import CodeAgent, OpenAIModel

    def script(prompt):
        last = prompt.rsplit("<|im_start|>user\n", 1)[1]
        code = "final_answer(number)" if "Observation" in last or "42" in last else "number = 2 * 21\nprint(number)"
        return f"Thought: I compute.\n<code>\n{code}\n</code>"

    trajectory = serve(script, **LONG)
    access = trajectory.access
    model = OpenAIModel("policy", api_base=access.base_url, api_key=access.api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("2*21?") == 42
    drawn = [turns for _, turns in trajectory.texts()]
    assert sum(map(len, drawn)) == 2
    assert drawn[-1][-1].startswith("Thought: I compute.\n<code>\nfinal_answer(number)\n</code>")
    steps = [step for step in agent.memory.steps if getattr(step, "model_input_messages", None)]
    for step, text in zip(steps, recorded(trajectory), strict=True):
        assert text.startswith(believed(texts(step.model_input_messages)))


def test_a_tool_calling_agent(serve):
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: the number.
        """
        return 2 * number

    def script(prompt):
        last = prompt.rsplit("<|im_start|>user\n", 1)[1]
        if "42" in last:
            return '<tool_call>\n{"name": "final_answer", "arguments": {"answer": 42}}\n</tool_call>'
        return calculates("<|im_start|>user\n").partition("\n")[2]

    trajectory = serve(script, ignored=("tool_choice",), **LONG)
    access = trajectory.access
    model = OpenAIModel("policy", api_base=access.base_url, api_key=access.api_key)
    agent = ToolCallingAgent(tools=[double], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("2*21?") == 42
    assert trajectory.recorder.ignored == {"tool_choice": 2}
    steps = [step for step in agent.memory.steps if getattr(step, "model_input_messages", None)]
    for step, text in zip(steps, recorded(trajectory), strict=True):
        assert text.startswith(believed(texts(step.model_input_messages)))
