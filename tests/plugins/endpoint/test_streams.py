"""Streams: texts arrive while they are drawn, nothing is recorded otherwise than without, who hangs up cancels."""

from __future__ import annotations

import threading

import anthropic
import openai
import pytest

from tests.plugins.endpoint.conftest import TOKENIZER
from tests.plugins.endpoint.test_chat import CALL, TOOLS, calculates
from verl.agents.parsers import get_tool_parser
from verl.agents.parsers.base import settled
from verl.errors import RolloutError
from verl.plugins.endpoint.streamed_text import StreamedText

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = TOOLS[0]["function"]["parameters"]


def until(condition):
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come")


@pytest.fixture
def silent(serve):
    """A policy that draws what the test says, when it says so."""
    return serve(lambda prompt: None)


def say(trajectory, text):
    """Let the policy draw a text, and go on."""
    until(lambda: trajectory.engine.waiting)
    trajectory.engine.waiting[0].tell(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def finish(trajectory, text):
    call, request = trajectory.engine.waiting.pop(), trajectory.engine.requests[-1]
    call.settle(trajectory.engine.draw(text, request.sampling))


def chat_texts(trajectory):
    client = openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key)
    stream = client.chat.completions.create(model="policy", messages=HI, stream=True)
    return client, stream, (piece.choices[0].delta.content for piece in stream)


def completion_texts(trajectory):
    client = openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key)
    stream = client.completions.create(model="policy", prompt="Hi", stream=True, max_tokens=99)
    return client, stream, (piece.choices[0].text for piece in stream)


def message_texts(trajectory):
    client = anthropic.Anthropic(base_url=trajectory.access.root, api_key=trajectory.access.api_key)
    stream = client.messages.create(model="policy", messages=HI, max_tokens=99, stream=True)
    deltas = (event.delta for event in stream if event.type == "content_block_delta")
    return client, stream, (delta.text for delta in deltas)


def response_texts(trajectory):
    client = openai.OpenAI(base_url=trajectory.access.base_url, api_key=trajectory.access.api_key)
    stream = client.responses.create(model="policy", input="Hi", stream=True)
    return client, stream, (event.delta for event in stream if event.type == "response.output_text.delta")


ALL = [chat_texts, completion_texts, message_texts, response_texts]


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("texts_of", ALL)
def test_texts_arrive_before_the_answer_is_drawn(silent, texts_of):
    drawing = in_thread(say, silent, "One two")
    client, stream, texts = texts_of(silent)
    found = ""
    while found != "One two":  # the answer is not drawn, so all of this came before
        found += next(texts) or ""
    drawing.join()
    say(silent, ", three")
    while found != "One two, three":
        found += next(texts) or ""
    assert silent.recorder.outputs() == []
    finish(silent, "One two, three.")
    assert found + "".join(text or "" for text in texts) == "One two, three."
    [(_, [drawn])] = silent.texts()
    assert drawn == "One two, three.<|im_end|>"
    stream.close()
    client.close()


@pytest.mark.parametrize("texts_of", ALL)
def test_a_client_that_hangs_up_in_a_stream_cancels(silent, texts_of):
    drawing = in_thread(say, silent, "One two")
    client, stream, texts = texts_of(silent)
    assert any(next(texts) for _ in range(3))
    drawing.join()
    stream.close()
    client.close()
    until(lambda: not silent.engine.waiting)
    assert silent.recorder.outputs() == []


@pytest.mark.parametrize(("texts_of", "error"), [(chat_texts, openai.APIError), (message_texts, anthropic.APIError)])
def test_an_error_in_a_stream_reaches_the_client(silent, texts_of, error):
    drawing = in_thread(say, silent, "One two")
    client, stream, texts = texts_of(silent)
    assert any(next(texts) for _ in range(3))
    drawing.join()
    silent.engine.waiting.pop().future().set_exception(RolloutError("the engine is gone."))
    with pytest.raises(error, match="the engine is gone"):
        list(texts)
    stream.close()
    client.close()


def test_what_a_stream_records_is_what_the_whole_records(serve):
    recorded = []
    for is_streamed in (False, True):
        trajectory = serve(calculates)
        with anthropic.Anthropic(base_url=trajectory.access.root, api_key=trajectory.access.api_key) as client:
            tools = [{"name": "double", "description": "-", "input_schema": SCHEMA}]
            asked = {"model": "policy", "messages": HI, "max_tokens": 512, "tools": tools}
            if is_streamed:
                with client.messages.stream(**asked) as stream:
                    pieces = list(stream.text_stream)
                    answer = stream.get_final_message()
                assert len(pieces) > 5
                assert "".join(pieces) == "Let me see."
            else:
                answer = client.messages.create(**asked)
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        [output] = trajectory.recorder.outputs()
        [turn] = trajectory.policy.turns
        recorded.append((output.prompt_ids, output.response_ids, output.response_mask, turn.log_probs))
    assert recorded[0] == recorded[1]


def spoken(text, **kwargs):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return get_tool_parser("hermes", TOKENIZER).spoken(ids, **kwargs)


def test_only_text_that_stays_is_spoken():
    assert spoken("Let me see. ") == "Let me see."
    assert spoken("Let me see. <tool") == "Let me see."
    assert spoken(f"Let me see. {CALL} And more") == "Let me see."
    assert spoken("a < b") == "a < b"
    assert spoken("<think>2 + 2") == ""
    assert spoken("<think>2 + 2</think>\n\nIt is 4") == "It is 4"
    assert spoken("2 + 2", is_thinking=True) == ""
    assert spoken("It is 4<|im_end|>") == "It is 4"
    assert settled("x\ufffd\ufffd", ()) == "x"
    assert settled("so STO", ("STOP",)) == "so"
    assert settled("so STO", ("STOP", "so!")) == ""


def test_characters_of_several_tokens_arrive_whole():
    raw = "né 🙂 é".encode()
    sent = []
    text = StreamedText(lambda ids: bytes(ids).decode(errors="replace"), (), sent.append)
    for count in range(1, len(raw) + 1):
        text.take(list(raw[:count]))
    assert "".join(sent) == "né 🙂 é"
    assert all("\ufffd" not in piece for piece in sent)


def test_the_content_begins_with_what_was_sent():
    def completed(sent, content):
        text = StreamedText(lambda ids: sent, (), lambda new: None)
        text.take([])
        return text.completed(content)

    assert completed("One", "One two") == "One two"
    assert completed("\n\nOne", "One two") == "\n\nOne two"
    assert completed("hm, 4", "It is 4") == "hm, 4It is 4"  # thoughts that were not begun
