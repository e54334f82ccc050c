"""Agents of clients and kits that call tools: programs for the loop ``program_agent``.

The policy doubles two numbers in one turn, then asks for a half, which fails, then ends. Each program returns JSON: the
conversations that the kit believes it had, and the tokens that it counted, input and output. In a conversation
``drawn`` is the role of what the policy drew, whose ``calls`` are names and arguments; ``forced`` if one was forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from verl.plugins.endpoint.server import Access

SYSTEM, QUESTION = "Use the tools.", "2?"
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


class OddError(ValueError):
    """The number has no half here."""


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number.
    """
    return 2 * number


def halve(number: int) -> int:
    """Halve a number.

    Args:
        number: the number.
    """
    raise OddError("odd")


TOOLS = (double, halve)


def told(talks: Sequence[Any], tokens: Sequence[int | None]) -> str:
    return json.dumps([talks, tokens])


def of(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def drawn(text: str, calls: Iterable[tuple[str, Any]] = (), forced: bool = False) -> dict[str, Any]:
    """A turn of the policy; arguments are an object or its text."""
    read = [[name, json.loads(args) if isinstance(args, str) else args] for name, args in calls]
    return {"role": "drawn", "content": text, "calls": read, "forced": forced}


def called(name: str, arguments: Any) -> str:
    """What a program of its own answers to a call."""
    try:
        return str({tool.__name__: tool for tool in TOOLS}[name](**arguments))
    except OddError as error:
        return f"Error: {error}"


# ---- the vendors' clients


def openai_chat(task: Any, is_streamed: bool = False, choice: str = "auto") -> str:
    import openai

    described = [{"name": tool.__name__, "description": tool.__doc__, "parameters": NUMBER} for tool in TOOLS]
    talk, tokens = [of("system", SYSTEM), of("user", QUESTION)], [0, 0]
    messages: list[Any] = list(talk)
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            asked: Any = {"model": "policy", "messages": messages, "tool_choice": choice}
            asked["tools"] = [{"type": "function", "function": function} for function in described]
            if is_streamed:
                options = {"include_usage": True}
                with client.chat.completions.stream(**asked, stream_options=options) as stream:
                    stream.until_done()
                    reply: Any = stream.get_final_completion()
            else:
                reply = client.chat.completions.create(**asked)
            said = reply.choices[0].message
            tokens = [tokens[0] + reply.usage.prompt_tokens, tokens[1] + reply.usage.completion_tokens]
            calls = [(call, call.function.name, call.function.arguments) for call in said.tool_calls or ()]
            made = [(name, args) for _, name, args in calls]
            talk.append(drawn(said.content, made, forced=choice == "required"))
            sent = [
                {"id": call.id, "type": "function", "function": {"name": name, "arguments": args}}
                for call, name, args in calls
            ]
            messages.append({"role": "assistant", "content": said.content, "tool_calls": sent})
            if not calls:
                return told([talk], tokens)
            for call, name, args in calls:
                result = called(name, json.loads(args))
                talk.append(of("tool", result))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_chat_forced(task: Any) -> str:
    return openai_chat(task, choice="required")


def openai_chat_streamed(task: Any) -> str:
    return openai_chat(task, is_streamed=True)


def openai_responses(task: Any, follows: bool = False) -> str:
    import openai

    tools: Any = [
        {"type": "function", "name": tool.__name__, "description": tool.__doc__, "parameters": NUMBER} for tool in TOOLS
    ]
    talk, tokens = [of("system", SYSTEM), of("user", QUESTION)], [0, 0]
    items: list[Any] = [of("user", QUESTION)]
    previous: Any = openai.omit
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            reply: Any = client.responses.create(
                model="policy", instructions=SYSTEM, input=items, tools=tools, previous_response_id=previous
            )
            tokens = [tokens[0] + reply.usage.input_tokens, tokens[1] + reply.usage.output_tokens]
            calls = [item for item in reply.output if item.type == "function_call"]
            talk.append(drawn(reply.output_text, [(call.name, call.arguments) for call in calls]))
            if not calls:
                return told([talk], tokens)
            if follows:
                items, previous = [], reply.id
            else:
                items += reply.output
            for call in calls:
                result = called(call.name, json.loads(call.arguments))
                talk.append(of("tool", result))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def openai_responses_following(task: Any) -> str:
    return openai_responses(task, follows=True)


def anthropic_messages(task: Any, is_streamed: bool = False) -> str:
    import anthropic

    tools: Any = [{"name": tool.__name__, "description": tool.__doc__, "input_schema": NUMBER} for tool in TOOLS]
    talk, tokens = [of("system", SYSTEM), of("user", QUESTION)], [0, 0]
    messages: list[Any] = [of("user", QUESTION)]
    with anthropic.Anthropic(base_url=task.anthropic_base_url, api_key=task.api_key) as client:
        while True:
            asked: Any = {"model": "policy", "system": SYSTEM, "max_tokens": 500, "messages": messages, "tools": tools}
            if is_streamed:
                with client.messages.stream(**asked) as stream:
                    reply: Any = stream.get_final_message()
            else:
                reply = client.messages.create(**asked)
            tokens = [tokens[0] + reply.usage.input_tokens, tokens[1] + reply.usage.output_tokens]
            calls = [block for block in reply.content if block.type == "tool_use"]
            text = "".join(block.text for block in reply.content if block.type == "text")
            talk.append(drawn(text, [(call.name, call.input) for call in calls]))
            if not calls:
                return told([talk], tokens)
            results = [(call.id, called(call.name, call.input)) for call in calls]
            talk += [of("tool", text) for _, text in results]
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": blocks}]


def anthropic_messages_streamed(task: Any) -> str:
    return anthropic_messages(task, is_streamed=True)


# ---- openai-agents


async def openai_agents(task: Any, form: str, is_streamed: bool = False, **settings: Any) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        model = getattr(agents, form)("policy", client)
        tools: Any = [agents.function_tool(tool) for tool in TOOLS]
        usage = agents.ModelSettings(include_usage=True)
        agent = agents.Agent("a", instructions=SYSTEM, tools=tools, model=model, model_settings=usage)
        if is_streamed:
            done: Any = agents.Runner.run_streamed(agent, QUESTION, **settings)
            async for _ in done.stream_events():
                pass
        else:
            done = await agents.Runner.run(agent, QUESTION, **settings)
    counted = done.context_wrapper.usage
    talk = [of("system", SYSTEM), *messages_of(done.to_input_list())]
    return told([talk], [counted.input_tokens, counted.output_tokens])


def messages_of(items: Iterable[Any]) -> list[dict[str, Any]]:
    """The conversation that openai-agents holds as items."""
    talk: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            talk[-1] = drawn(talk[-1]["content"], [*talk[-1]["calls"], (item["name"], item["arguments"])])
        elif kind == "function_call_output":
            talk.append(of("tool", item["output"]))
        elif item["role"] == "user":
            talk.append(of("user", item["content"]))
        else:
            talk.append(drawn("".join(part["text"] for part in item["content"])))
    return talk


async def openai_agents_chat(task: Any) -> str:
    return await openai_agents(task, "OpenAIChatCompletionsModel")


async def openai_agents_chat_streamed(task: Any) -> str:
    return await openai_agents(task, "OpenAIChatCompletionsModel", is_streamed=True)


async def openai_agents_responses(task: Any) -> str:
    return await openai_agents(task, "OpenAIResponsesModel")


async def openai_agents_responses_streamed(task: Any) -> str:
    return await openai_agents(task, "OpenAIResponsesModel", is_streamed=True)


async def openai_agents_responses_following(task: Any) -> str:
    return await openai_agents(task, "OpenAIResponsesModel", auto_previous_response_id=True)


async def openai_agents_handing_over(task: Any) -> str:
    """A sub-agent takes over; it sees what was said before under a system prompt of its own."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        main, sub = (agents.OpenAIChatCompletionsModel(name, client) for name in ("policy", "policy/checker"))
        checker = agents.Agent("checker", instructions="You check.", model=sub)
        agent = agents.Agent("main", instructions=SYSTEM, handoffs=[checker], model=main)
        done = await agents.Runner.run(agent, QUESTION)
    user, call, result, last = messages_of(done.to_input_list())
    usage = done.context_wrapper.usage
    made = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in call["calls"]]
    seen = of("assistant", call["content"]) | {"tool_calls": made}
    talks = [[of("system", SYSTEM), user, call], [of("system", "You check."), user, seen, result, last]]
    return told(talks, [usage.input_tokens, usage.output_tokens])


# ---- langgraph


def langgraph(task: Any, **settings: Any) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import ToolNode, create_react_agent

    model = ChatOpenAI(model="policy", base_url=task.base_url, api_key=task.api_key, **settings)
    agent = create_react_agent(model, ToolNode(list(TOOLS), handle_tool_errors=True), prompt=SYSTEM)
    talk, tokens = [of("system", SYSTEM)], [0, 0]
    for message in agent.invoke({"messages": [("user", QUESTION)]})["messages"]:
        if message.type == "ai":
            talk.append(drawn(str(message.text), [(call["name"], call["args"]) for call in message.tool_calls]))
            tokens[0] += message.usage_metadata["input_tokens"]
            tokens[1] += message.usage_metadata["output_tokens"]
        else:
            talk.append(of({"human": "user"}.get(message.type, message.type), str(message.text)))
    return told([talk], tokens)


def langgraph_chat(task: Any) -> str:
    return langgraph(task)


def langgraph_chat_streamed(task: Any) -> str:
    return langgraph(task, streaming=True, stream_usage=True)


def langgraph_responses(task: Any) -> str:
    return langgraph(task, use_responses_api=True)


def langgraph_responses_following(task: Any) -> str:
    return langgraph(task, use_responses_api=True, use_previous_response_id=True)


# ---- pydantic-ai


def model_of(form: str, access: Any) -> Any:
    if form == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("policy", provider=AnthropicProvider(base_url=access.root, api_key=access.api_key))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if form == "chat" else OpenAIResponsesModel
    return kind("policy", provider=OpenAIProvider(base_url=access.base_url, api_key=access.api_key))


async def pydantic_ai(task: Any, form: str) -> str:
    from pydantic_ai import Agent, ModelRetry

    agent = Agent(model_of(form, Access(task.anthropic_base_url, task.api_key)), system_prompt=SYSTEM)
    agent.tool_plain(double)

    @agent.tool_plain(name="halve")
    def refuse(number: int) -> int:
        """Halve a number."""
        raise ModelRetry("odd")

    done = await agent.run(QUESTION)
    talk: list[dict[str, Any]] = []
    for message in done.all_messages():
        parts = message.parts
        if message.kind == "response":
            calls = [(part.tool_name, part.args_as_dict()) for part in parts if part.part_kind == "tool-call"]
            talk.append(drawn("".join(part.content for part in parts if part.part_kind == "text"), calls))
            continue
        for part in parts:
            if part.part_kind == "tool-return":
                # Anthropic's form marks errors beside the text, which the policy does not see.
                talk.append(of("tool", part.model_response_str(wrap_if_error=form != "anthropic")))
            else:
                talk.append(of({"system-prompt": "system", "user-prompt": "user"}[part.part_kind], str(part.content)))
    return told([talk], [done.usage.input_tokens, done.usage.output_tokens])


async def pydantic_ai_chat(task: Any) -> str:
    return await pydantic_ai(task, "chat")


async def pydantic_ai_responses(task: Any) -> str:
    return await pydantic_ai(task, "responses")


async def pydantic_ai_anthropic(task: Any) -> str:
    return await pydantic_ai(task, "anthropic")


# ---- smolagents, which rewrites its history: each call is a conversation


def smolagents(task: Any, kind: str, tools: Sequence[Any]) -> str:
    import smolagents as kit

    model = kit.OpenAIModel("policy", api_base=task.base_url, api_key=task.api_key)
    agent = getattr(kit, kind)(tools=[kit.tool(tool) for tool in tools], model=model, max_steps=4, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = SYSTEM
    assert agent.run(QUESTION) == "done"
    talks, tokens = [], [0, 0]
    for step in agent.memory.steps:
        if not getattr(step, "model_input_messages", None):
            continue
        talk: list[dict[str, Any]] = []
        for message in step.model_input_messages:
            role = {"tool-call": "assistant", "tool-response": "user"}.get(message.role.value, message.role.value)
            text = message.content if isinstance(message.content, str) else "".join(p["text"] for p in message.content)
            if talk and talk[-1]["role"] == role:
                talk[-1]["content"] += f"\n{text}"
            else:
                talk.append(of(role, text))
        said = step.model_output_message
        calls = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
        talks.append([*talk, drawn(said.content, calls, forced=kind == "ToolCallingAgent")])
        tokens = [tokens[0] + step.token_usage.input_tokens, tokens[1] + step.token_usage.output_tokens]
    return told(talks, tokens)


def smolagents_tool_calling(task: Any) -> str:
    return smolagents(task, "ToolCallingAgent", TOOLS)


def smolagents_code(task: Any) -> str:
    return smolagents(task, "CodeAgent", [])
