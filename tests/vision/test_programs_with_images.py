"""Programs that send pictures by the vendors' clients, and the training batch of what they believe was said."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.scripted_policy import ScriptedEngine, scripted_policy
from tests.support.vision_models import picture, picture_rows, tiny_vision_model_dir
from tests.vision.agent_batches import VisionAgents
from tests.vision.test_tools_with_images import EveryTurnLooks
from verl.agents.chat_template import ChatTemplate
from verl.agents.parsers import get_tool_parser
from verl.agents.parsers.base import ToolParser
from verl.base.registry import scoped_registrations
from verl.plugins.endpoint.calls import ModelCall
from verl.plugins.endpoint.recorder import RecorderSettings, TrajectoryRecorder
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.data_urls import url_of
from verl.vision.prompts import ImagePrompts


@pytest.fixture(autouse=True, scope="module")
def parser():
    with scoped_registrations():
        ToolParser.register("every_turn_looks")(EveryTurnLooks)
        yield


# Each client writes its vendor's messages. A talk is [what the program said, what the model answered, ...].
CLIENTS = """
import base64, json
import anthropic, openai
from PIL import Image
from tests.support.vision_models import picture, png

def coded(color, **size):
    return base64.b64encode(png(picture(color, **size))).decode()

HUGE = base64.b64encode(png(Image.new("1", (8000, 8001)))).decode()
PNG = "data:image/png;base64,"
BAD_URLS = [PNG + "%%%", PNG + "AAAA", PNG + HUGE, "data:text/html;base64,AAAA", "data:image/png,AAAA",
            "file:///etc/passwd", "http://a/b.png", 3]

class Chat:
    def __init__(self, task):
        self.client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)

    def text(self, text):
        return {"type": "text", "text": text}

    def image(self, data):
        return {"type": "image_url", "image_url": {"url": PNG + data, "detail": "high"}}

    def user(self, *parts):
        return [{"role": "user", "content": list(parts)}]

    def result(self, call, *parts):
        return [{"role": "tool", "tool_call_id": call, "content": list(parts)}]

    def ask(self, talk, tools):
        more = {"tools": [{"type": "function", "function": {"name": "look"}}]} if tools else {}
        found = self.client.chat.completions.create(model="policy", messages=talk, max_tokens=6, **more)
        message = found.choices[0].message
        talk.append(message.model_dump(exclude_none=True))
        return message.content, [call.id for call in message.tool_calls or ()]

    def bad(self):
        return [{"type": "image_url", "image_url": {"url": url}} for url in BAD_URLS] + [{"type": "image_url"}]

class Responses(Chat):
    def text(self, text):
        return {"type": "input_text", "text": text}

    def image(self, data):
        return {"type": "input_image", "image_url": PNG + data, "detail": "auto"}

    def result(self, call, *parts):
        return [{"type": "function_call_output", "call_id": call, "output": list(parts)}]

    def ask(self, talk, tools):
        more = {"tools": [{"type": "function", "name": "look", "parameters": None, "strict": None}]} if tools else {}
        found = self.client.responses.create(model="policy", input=talk, max_output_tokens=6, **more)
        talk += [item.model_dump(exclude_none=True) for item in found.output]
        return found.output_text, [item.call_id for item in found.output if item.type == "function_call"]

    def bad(self):
        urls = [{"type": "input_image", "detail": "auto", "image_url": url} for url in BAD_URLS]
        return urls + [{"type": "input_image", "detail": "auto", "file_id": "file-1"}]

class Messages(Chat):
    def __init__(self, task):
        self.client = anthropic.Anthropic(base_url=task.anthropic_base_url, api_key=task.api_key, max_retries=0)

    def image(self, data):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def result(self, call, *parts):
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": list(parts)}]}]

    def ask(self, talk, tools):
        more = {"tools": [{"name": "look", "input_schema": {"type": "object"}}]} if tools else {}
        found = self.client.messages.create(model="policy", messages=talk, max_tokens=6, **more)
        talk.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in found.content]})
        texts = [block.text for block in found.content if block.type == "text"]
        return "".join(texts), [block.id for block in found.content if block.type == "tool_use"]

    def bad(self):
        sources = [
            {"type": "base64", "media_type": "image/png", "data": "%%%"},
            {"type": "base64", "media_type": "image/png", "data": "AAAA"},
            {"type": "base64", "media_type": "image/png", "data": HUGE},
            {"type": "base64", "media_type": "text/html", "data": "AAAA"},
            {"type": "base64", "media_type": "image/png"},
            {"type": "url", "url": "file:///etc/passwd"},
            {"type": "url", "url": "http://a/b.png"},
            {"type": "file", "file_id": "file_1"},
        ]
        return [{"type": "image", "source": source} for source in sources] + [{"type": "image"}]

def refusal(client, *parts):
    try:
        client.ask(client.user(*parts), False)
    except (openai.BadRequestError, anthropic.BadRequestError) as error:
        return [error.status_code, error.body.get("param"), error.body.get("error", error.body)]
    return "answered"

def answer(task, kind):
    client = kind(task)
    said = []
    talk = client.user(client.text("a"), client.image(coded("red")))
    said.append(client.ask(talk, False)[0])
    talk += client.user(client.image(coded("blue", size=(24, 16))), client.text("b"))
    said.append(client.ask(talk, False)[0])
    other = client.user(client.text("a"), client.image(coded("green")))
    said.append(client.ask(other, False)[0])  # the same tokens with another picture are another sequence
    looks = client.user(client.text("c"))
    [call] = client.ask(looks, True)[1]
    looks += client.result(call, client.text("see"), client.image(coded("white", size=(16, 24))))
    client.ask(looks, True)
    large = client.image(coded("red", size=(64, 64)))
    refused = [refusal(client, part) for part in client.bad()]
    return json.dumps([said, [*refused, refusal(client, large, large, large)]])

def chat(task):
    return answer(task, Chat)

def responses(task):
    return answer(task, Responses)

def messages(task):
    return answer(task, Messages)
"""


def runs(found: Any, row: int, agents: VisionAgents) -> list[str]:
    """Texts of a sequence: what others wrote, what was drawn, and so on, without ends of turns."""
    mask = [0] * len(found.batch["prompts"][row]) + found.batch["response_mask"][row].tolist()
    pieces: list[tuple[int, list[int]]] = []
    shown = found.batch["attention_mask"][row].tolist()
    for token, drawn, seen in zip(found.batch["input_ids"][row].tolist(), mask, shown, strict=True):
        if seen and (not pieces or pieces[-1][0] != drawn):
            pieces.append((drawn, []))
        if seen:
            pieces[-1][1].append(token)
    texts = [agents.tokenizer.decode(ids, skip_special_tokens=bool(drawn)) for drawn, ids in pieces]
    pad = re.compile(r"<\|vision_start\|>((?:<\|image_pad\|>)+)<\|vision_end\|>")
    return [pad.sub(lambda m: f"[{m[1].count('pad')}]", text).removeprefix("<eos>") for text in texts]


@pytest.mark.parametrize("vendor", ["chat", "responses", "messages"])
def test_pictures_that_a_program_sends(vendor, tmp_path):
    (tmp_path / "program.py").write_text(CLIENTS)
    entry = f"- {{name: talks, _target_: program_agent, program: {tmp_path}/program.py:{vendor}}}\n"
    (tmp_path / "loops.yaml").write_text(entry)
    keys = {
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml",
        "actor_rollout_ref__rollout__multi_turn__format": "every_turn_looks",
    }
    agents = VisionAgents(tmp_path, data__max_response_length=60, **keys)
    found = agents.answer(agents.prompts(picture_rows(1, text_every=1), n=1, agent_name=["talks"]))
    more = found.non_tensor_batch
    assert more["trajectory_message"].tolist() == [""] * 3
    said, refused = json.loads(more["agent_answer"][0])
    # What the client believes, and what was recorded: the texts, the pictures' tokens, and the pictures.
    first, other, looked = (runs(found, row, agents) for row in range(3))
    assert first == ["<user>a[4]<assistant>", said[0], "<user>[6]b<assistant>", said[1]]
    assert other == ["<user>a[4]<assistant>", said[2]]
    assert looked[::2] == ["<user>c<assistant>", "tool: see[6]<assistant>"]
    grids = [row["image_grid_thw"].tolist() for row in more["multi_modal_inputs"]]
    assert grids == [[[1, 4, 4], [1, 4, 6]], [[1, 4, 4]], [[1, 6, 4]]]
    told = more["trajectory_conversation"].tolist()
    assert [message["role"] for message in told[2]] == ["user", "assistant", "tool", "assistant"]
    assert told[2][2]["content"] == [{"type": "text", "text": "see"}, {"type": "image"}]
    assert "base64" not in json.dumps(told)
    drawn = found.batch["response_mask"].bool()
    log_probs = agents.trainers_log_probs(found)
    assert_close(found.batch["rollout_log_probs"][drawn], log_probs[drawn], atol=1e-5, rtol=0)
    # Bad pictures, each with its reason in the vendor's form.
    reasons = [
        "base64 text of an image is damaged",
        "it is no image file",
        "it has 8000 x 8001 pixels, and 64000000 are the most",
        *{
            "messages": ["media type of an image is 'text/html'", "data of an image are None"],
        }.get(vendor, ["URL 'data:text/html;base64,AAAA'. Expected image/png", "URL 'data:image/png,AAAA'"]),
        *["no addresses and no files|no address and no file"] * (3 if vendor == "messages" else 2),
        *{"messages": ["source None"], "chat": ["Expected {'type': 'image_url'"] * 2}.get(vendor, ["no addresses"] * 2),
    ]
    for reason, (status, param, body) in zip(reasons, refused[:-1], strict=True):
        assert status == 400
        assert re.search(reason, body["message"]), body
        assert len(body["message"]) < 400
        assert (param, body["type"]) == (
            (None if vendor == "messages" else "input" if vendor == "responses" else "messages"),
            "invalid_request_error",
        )
    full = "prompt is too long: 200 tokens" if vendor == "messages" else "resulted in 200 tokens"
    assert re.search(full, refused[-1][2]["message"])


ROWS = """
import json, os, sys
import anthropic, openai

def sent(part):
    url = part["image_url"]["url"]
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}

def answer(task):
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    client.chat.completions.create(model="policy", messages=task.messages, max_tokens=6)
    assert [m for m in task.messages if task.images] == task.row["raw_prompt"] * bool(task.images)
    assert "multi_modal_inputs" not in task.row
    try:
        client.completions.create(model="policy", prompt="<|vision_start|><|image_pad|><|vision_end|>a")
    except openai.BadRequestError as error:
        assert error.param == "prompt"
    else:
        raise AssertionError("a raw prompt has no images")
    return str(len(task.images))

def command():
    row = json.load(open(os.environ["VERL_ROW"]))
    talk = row["raw_prompt"]
    for message in talk:
        if isinstance(message["content"], list):
            message["content"] = [sent(p) if p["type"] == "image_url" else p for p in message["content"]]
    anthropic.Anthropic().messages.create(model="policy", messages=talk, max_tokens=6)
    print(len(row.get("images", [])))

if __name__ == "__main__":
    command()
"""


@pytest.mark.parametrize(
    "way", ["program: {file}:answer", pytest.param("command: [{python}, {file}]", marks=pytest.mark.slow)]
)
def test_a_program_gets_the_pictures_of_its_row(way, tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    entry = way.format(file=tmp_path / "rows.py", python=sys.executable)
    (tmp_path / "loops.yaml").write_text(f"- {{name: talks, _target_: program_agent, {entry}}}\n")
    agents = VisionAgents(
        tmp_path, "qwen3_vl", actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "loops.yaml"
    )
    prompts = agents.prompts(picture_rows(2, text_every=2), n=1, agent_name=["talks"] * 2)
    found = agents.answer(prompts)
    assert found.non_tensor_batch["trajectory_message"].tolist() == [""] * 2
    assert found.non_tensor_batch["agent_answer"].tolist() == ["1", "0"]
    # The policy saw what the data set made of the row: the same tokens, and the same pixels bit by bit.
    assert torch.equal(found.batch["prompts"], prompts.batch["input_ids"])
    rows = zip(*(b.non_tensor_batch["multi_modal_inputs"] for b in (found, prompts)), strict=True)
    for shown, given in rows:
        assert set(shown) == set(given)
        assert all(torch.equal(shown[name], given[name]) for name in given)
    drawn = found.batch["response_mask"].bool()
    assert_close(found.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(found)[drawn], atol=1e-5, rtol=0)


def test_pictures_are_decoded_in_another_thread_than_that_of_all_calls(tmp_path):
    path = tiny_vision_model_dir(tmp_path)
    tokenizer = hf_tokenizer(path)
    readers = []

    class Watched(ImagePrompts):
        def read(self, image: Any, place: str) -> Any:
            readers.append(threading.current_thread())
            return super().read(image, place)

    settings = RecorderSettings(
        template=ChatTemplate(tokenizer),
        parser=get_tool_parser("hermes", tokenizer),
        prompt_length=50,
        response_length=50,
    )
    engine, maker = ScriptedEngine(tokenizer, lambda prompt: "red"), Watched(hf_processor(path))
    recorder = TrajectoryRecorder(scripted_policy(engine, maker, response_length=50), settings, maker)
    shown = {"role": "user", "content": [{"type": "image", "image": url_of(picture("red"))}]}
    [answer] = asyncio.run(recorder.answer(ModelCall(model="policy", messages=[shown])))
    assert answer.content == "red"
    assert len(readers) == 1
    assert threading.main_thread() not in readers
