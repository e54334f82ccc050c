"""``/v1/messages``, ``/v1/responses`` and ``/v1/completions`` by the vendors' clients."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tests.plugins.endpoint.test_chat import CALL, calculates

DRAWN = [f"Let me see. {CALL}<|im_end|>", "It is 42.<|im_end|>"]
SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}}


@pytest.fixture
def trajectory(serve):
    return serve(calculates)


@pytest.fixture
def claude(trajectory):
    with anthropic.Anthropic(base_url=trajectory.access.root, api_key=trajectory.access.api_key) as client:
        yield client


@pytest.fixture
def gpt(trajectory):
    with openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key) as client:
        yield client


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_with_a_tool(claude, trajectory, is_streamed):
    asked = {
        "model": "policy",
        "max_tokens": 512,
        "system": "Be brief.",
        "tools": [{"name": "double", "description": "Double a number.", "input_schema": SCHEMA}],
    }

    def ask(messages):
        if not is_streamed:
            return claude.messages.create(messages=messages, **asked)
        with claude.messages.stream(messages=messages, **asked) as stream:
            return stream.get_final_message()

    messages = [{"role": "user", "content": "2*21?"}]
    first = ask(messages)
    text, call = first.content
    assert (first.stop_reason, text.text) == ("tool_use", "Let me see.")
    assert (call.name, call.input) == ("double", {"number": 21})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(messages)
    assert (second.stop_reason, [block.text for block in second.content]) == ("end_turn", ["It is 42."])
    assert second.usage.output_tokens == len("It is 42.") + 1
    [(prompt, drawn)] = trajectory.texts()
    assert "Be brief." in prompt
    assert drawn == DRAWN
    stopped = claude.messages.create(
        model="policy", max_tokens=512, messages=[{"role": "user", "content": "Hi"}], stop_sequences=["see"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "see")
    assert stopped.content[0].text == "Let me "


def test_messages_are_refused_in_anthropics_form(claude, trajectory):
    hi = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.BadRequestError, match="top_k: 3 is not the rollout's -1"):
        claude.messages.create(model="policy", max_tokens=5, messages=hi, extra_body={"top_k": 3})
    result = {"type": "tool_result", "tool_use_id": "a", "content": "42"}
    call = {"type": "tool_use", "id": "a", "name": "double", "input": {}}
    for blocks, reason in (
        ([{"role": "user", "content": [{"type": "text", "text": "So"}, result]}], "tool_result stand before text"),
        ([*hi, {"role": "assistant", "content": [call, {"type": "text", "text": "So"}]}, *hi], "text stand before"),
        ([*hi, {"role": "assistant", "content": [{**call, "input": 3}]}, *hi], "the input 3. Expected an object"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}], "block 'thinking'"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=reason):
            claude.messages.create(model="policy", max_tokens=5, messages=blocks)
    long = [{"role": "user", "content": "Hi" * 4000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2560 maximum"):
        claude.messages.create(model="policy", max_tokens=5, messages=long)
    stranger = anthropic.Anthropic(base_url=trajectory.access.root, api_key="sk-other")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="policy", max_tokens=5, messages=hi)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_with_a_tool(gpt, trajectory, is_streamed):
    tools = [{"type": "function", "name": "double", "parameters": SCHEMA, "strict": True}]
    asked = {"model": "policy", "tools": tools, "instructions": "Be brief."}

    def ask(items):
        if not is_streamed:
            return gpt.responses.create(input=items, **asked)
        with gpt.responses.stream(input=items, **asked) as stream:
            stream.until_done()
            return stream.get_final_response()

    items = [{"role": "user", "content": "2*21?"}]
    first = ask(items)
    message, call = first.output
    assert message.content[0].text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("double", {"number": 21})
    items += [
        *(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    second = ask(items)
    assert (second.status, second.output_text) == ("completed", "It is 42.")
    assert second.usage.output_tokens == len("It is 42.") + 1
    assert [drawn for _, drawn in trajectory.texts()] == [DRAWN]
    short = gpt.responses.create(model="policy", input="Hi", max_output_tokens=3)
    assert (short.status, short.incomplete_details.reason, short.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Let",
    )
    for named, wrong in (
        ("previous_response_id", {"previous_response_id": "resp_of_another"}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
        ("reasoning", {"reasoning": {"effort": "high"}}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            gpt.responses.create(model="policy", input="Hi", **wrong)
        assert refused.value.param == named


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_that_follows_an_earlier_one_continues_its_sequence(gpt, trajectory, is_streamed):
    tools = [{"type": "function", "name": "double", "parameters": SCHEMA}]

    def ask(**asked):
        asked |= {"model": "policy", "tools": tools}
        if not is_streamed:
            return gpt.responses.create(**asked)
        with gpt.responses.stream(**asked) as stream:
            stream.until_done()
            return stream.get_final_response()

    first = ask(input="2*21?", instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "42"}
    second = ask(input=[result], instructions="Be brief.", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("It is 42.", first.id)
    third = ask(input="And 2*21?", instructions="Be brief.", previous_response_id=second.id)
    assert [drawn for _, drawn in trajectory.texts()] == [[*DRAWN, DRAWN[0]]]
    fork = ask(input=[result], instructions="Be brief.", previous_response_id=first.id)
    assert [drawn for _, drawn in trajectory.texts()] == [[*DRAWN, DRAWN[0]], DRAWN[1:]]
    # As at OpenAI, instructions hold for one response. So this is another conversation.
    ask(input="And 2*21?", previous_response_id=fork.id)
    prompt, drawn = trajectory.texts()[-1]
    assert ("Be brief." in prompt, "<tool_response>\n42" in prompt, drawn) == (False, True, DRAWN[:1])
    assert third.usage.input_tokens == len(trajectory.engine.requests[2].prompt_ids)


def test_a_response_that_is_not_stored_or_of_another_trajectory_cannot_be_followed(serve, gpt, trajectory):
    other = serve(calculates)
    with openai.OpenAI(base_url=other.access.base_url, api_key=other.access.api_key) as client:
        of_other = client.responses.create(model="policy", input="Hi").id
    asked = len(trajectory.engine.requests)
    for id in (of_other, gpt.responses.create(model="policy", input="Hi", store=False).id):
        with pytest.raises(openai.BadRequestError, match=f"there is no stored response '{id}'") as refused:
            gpt.responses.create(model="policy", input="Hi", previous_response_id=id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    assert len(trajectory.engine.requests) == asked + 1


def test_completions_of_raw_prompts(serve):
    trajectory = serve(lambda prompt: " four." if prompt.endswith("two are") else " six.")
    with openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key) as client:
        ask = client.completions.create
        begin = "<|im_start|>user\nSay it: two and two are"
        first = ask(model="policy", prompt=begin, stop="r", logprobs=0).choices[0]
        assert (first.text, first.finish_reason) == (" fou", "stop")
        assert first.logprobs.tokens == [" ", "f", "o", "u", "r"]
        assert first.logprobs.text_offset == [0, 1, 2, 3, 4]
        counted = {"include_usage": True}
        prompt = f"{begin} four, and two are"
        *streamed, last = ask(model="policy", prompt=prompt, stream=True, max_tokens=4, stream_options=counted)
        assert "".join(piece.choices[0].text for piece in streamed) == " fou"
        assert (last.choices, last.usage.completion_tokens) == ([], 4)
        for token in (-1, 10**9):
            with pytest.raises(openai.BadRequestError, match=f"{token} is no token") as refused:
                ask(model="policy", prompt=[5, token])
            assert refused.value.param == "prompt"
        [(prompt, drawn)] = trajectory.texts()
        assert prompt == begin
        assert drawn == [" four", " fou"]
        ids = trajectory.recorder.outputs()[0]
        again = ask(model="policy", prompt=ids.prompt_ids + ids.response_ids + [5], max_tokens=4)
        assert again.usage.prompt_tokens == len(ids.prompt_ids + ids.response_ids) + 1
        assert [len(drawn) for _, drawn in trajectory.texts()] == [3]
        special = trajectory.recorder.tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert ids.prompt_ids[0] == special
