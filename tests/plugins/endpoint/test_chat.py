"""``/v1/chat/completions`` by the client of OpenAI: what it gets, and what is recorded."""

from __future__ import annotations

import base64
import json

import openai
import pytest

from tests.support.vision_models import picture, png

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Double a number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'


def calculates(prompt: str) -> str:
    """Call the tool, then say its result."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[1]
    return "It is 42." if "<tool_response>" in last else f"Let me see. {CALL}"


@pytest.fixture
def client():
    made = []

    def make(trajectory, **kwargs):
        made.append(openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(client, messages, **kwargs):
    return client.chat.completions.create(model="policy", messages=messages, **kwargs)


def test_a_conversation_with_a_tool_is_one_sequence_of_the_drawn_tokens(serve, client):
    trajectory = serve(calculates)
    messages = [{"role": "user", "content": "2*21?"}]
    first = ask(client(trajectory), messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see."
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("double", {"number": 21})
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    second = ask(client(trajectory), messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 42."
    assert second.choices[0].finish_reason == "stop"
    [output] = trajectory.recorder.outputs()
    assert trajectory.texts()[0][1] == [f"Let me see. {CALL}<|im_end|>", "It is 42.<|im_end|>"]
    drawn = [request.prompt_ids for request in trajectory.engine.requests]
    whole = output.prompt_ids + output.response_ids
    assert drawn[0] == output.prompt_ids
    assert whole[: len(drawn[1])] == drawn[1]  # the second call saw the tokens of the first as they were drawn
    assert second.usage.prompt_tokens == len(drawn[1])
    assert second.usage.completion_tokens == len("It is 42.") + 1  # one for each letter, and the end


def test_a_stream_says_what_the_whole_says(serve, client):
    asks = client(serve(calculates))
    question = [{"role": "user", "content": "2*21?"}]
    whole = ask(asks, question, tools=TOOLS, logprobs=True)
    with asks.chat.completions.stream(
        model="policy", messages=question, tools=TOOLS, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        stream.until_done()
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    [call], [other] = streamed.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert (call.id, call.function.arguments) == (other.id, other.function.arguments)
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.usage == whole.usage
    text = "".join(token.token for token in streamed.choices[0].logprobs.content)
    assert text == f"Let me see. {CALL}<|im_end|>"


def test_a_key_opens_its_own_trajectory_only_and_only_while_it_runs(serve, client, endpoint):
    one, two = serve(calculates), serve(calculates)
    hi = [{"role": "user", "content": "Hi"}]
    stranger = openai.OpenAI(base_url=one.access.base_url, api_key=two.access.api_key)
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, hi)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with endpoint.access(one.recorder) as access:
        late = openai.OpenAI(base_url=access.base_url, api_key=access.api_key)
        assert [model.id for model in late.models.list()] == ["policy"]
    with pytest.raises(openai.APIStatusError, match="has ended") as ended:
        ask(late, hi)
    assert ended.value.status_code == 410
    assert one.recorder.outputs() == []


URL = "data:image/png;base64," + base64.b64encode(png(picture("red"))).decode()
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
SMALL = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"temperature": 0.2}, "temperature"),
        ({"seed": 3}, "seed"),
        ({"n": 0}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "treble"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages"),  # a model for text
        ({"messages": [{"role": "system", "content": [PICTURE]}, {"role": "user", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [SMALL]}]}, "detail"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]}, "name"),
        ({"messages": [{"role": "assistant", "refusal": "no"}, {"role": "user", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {}}, {"role": "user", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}, {"role": "user", "content": "Hi"}]}, "messages"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 9}, "max_tokens"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
def test_what_is_not_kept_is_refused_by_its_name(serve, client, wrong, named):
    trajectory = serve(calculates)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client(trajectory), **{"messages": [{"role": "user", "content": "Hi"}], **wrong})
    assert refused.value.param == named
    assert trajectory.engine.requests == []


def test_parameters_that_the_agent_ignores_are_counted(serve, client):
    trajectory = serve(calculates, ignored=("temperature", "seed"))
    hi = [{"role": "user", "content": "Hi"}]
    reply = ask(client(trajectory), hi, temperature=0.2, tools=TOOLS, seed=3, user="me", top_p=1)
    assert reply.choices[0].message.tool_calls
    assert trajectory.recorder.ignored == {"temperature": 1, "seed": 1}


def test_what_a_kit_may_send_along(serve, client):
    trajectory = serve(calculates)
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "2*21?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [], "name": "main", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Well?"},
    ]
    asks = client(trajectory)
    more = {"logit_bias": {}, "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False}
    reply = ask(asks, talk, tools=TOOLS, max_tokens=10**9, n=2, **more)
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 2
    assert len(trajectory.recorder.outputs()) == 2
    assert asks.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="POST chat/completions, completions, responses, messages") as none:
        asks.embeddings.create(model="policy", input="Hi")
    assert none.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'gpt' is not listed"):
        asks.models.retrieve("gpt")


def test_an_overlong_context_gets_the_vendors_error(serve, client):
    trajectory = serve(calculates, prompt_length=60, response_length=40)
    asks = client(trajectory)
    reply = ask(asks, [{"role": "user", "content": "Hi"}])
    assert reply.choices[0].finish_reason == "length"
    assert trajectory.recorder.status == "context_full"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as full:
        ask(asks, [{"role": "user", "content": "Hi" * 200}])
    assert full.value.code == "context_length_exceeded"
    assert ask(asks, [{"role": "user", "content": "Hi"}], max_tokens=3).choices[0].finish_reason == "length"
    assert trajectory.recorder.status == "done"  # the client asked for no more
