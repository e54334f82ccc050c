"""Kits that send pictures to a tiny vision-language model: the training batch against what the kit believes was said.

The policy is the engine ``native``. A parser reads its random tokens as letters, so that texts can be compared, and as
a call of the tool ``look`` in every first turn of two.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import inspect
import io
import json
import re
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from tests.plugins.endpoint.kits import image_programs
from tests.plugins.endpoint.test_chat import calculates
from tests.support.vision_models import picture_rows, png
from tests.vision.agent_batches import VisionAgents
from verl.agents.parsers.base import FunctionCall, ToolParser
from verl.base.registry import scoped_registrations
from verl.plugins.endpoint.programs import ProgramTask

STOPS = range(4, 100, 5)
"""Tokens that end a turn, beside the tokenizer's: a random model does not draw that one for long."""
ENDS = (1, *STOPS)
PROGRAMS = [
    *("openai_agents_responses", "openai_agents_responses_streamed", "openai_agents_chat_streamed"),
    *("langgraph_chat", "langgraph_chat_streamed", "langgraph_responses"),
    *("pydantic_ai_chat", "pydantic_ai_responses", "pydantic_ai_anthropic", "pydantic_ai_anthropic_streamed"),
    "smolagents",
]
OPENING = "I call "
"""The beginning of the calls that smolagents forces."""
PACKAGES = {"openai": "agents", "langgraph": "langgraph", "pydantic": "pydantic_ai", "smolagents": "smolagents"}


def letters(ids: list[int]) -> str:
    """The text of an answer: never empty, and the same for the same tokens."""
    return "say" + "".join(chr(97 + token % 26) for token in ids if token not in ENDS)


class EverySecondTurnLooks(ToolParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns = 0

    def opening(self, names: Any) -> str:
        return OPENING

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        self.turns += 1
        ends = any(tool["function"]["name"] == "final_answer" for tool in tools or ())
        if ends:  # smolagents: each of its calls is forced
            begun = self.tokenizer(OPENING, add_special_tokens=False)["input_ids"]
            assert responses_ids[: len(begun)] == begun
            responses_ids = responses_ids[len(begun) :]
        if self.turns % 2:
            return letters(responses_ids), [FunctionCall(name="look", arguments="{}")]
        calls = [FunctionCall(name="final_answer", arguments='{"answer": "done"}')] if ends else []
        return letters(responses_ids), calls


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    entry = f"- {{{{name: {{0}}, _target_: program_agent, program: {image_programs.__name__}.{{0}}}}}}\n"
    (folder / "loops.yaml").write_text("".join(entry.format(name) for name in PROGRAMS))
    with scoped_registrations():
        ToolParser.register("every_second_turn_looks")(EverySecondTurnLooks)
        made = VisionAgents(
            folder,
            data__max_prompt_length=400,
            data__max_response_length=1600,
            actor_rollout_ref__rollout__agent__agent_loop_config_path=folder / "loops.yaml",
            actor_rollout_ref__rollout__stop_token_ids=list(STOPS),
            actor_rollout_ref__rollout__multi_turn__format="every_second_turn_looks",
        )
        yield made
        made.close()


def recorded(batch: Any, row: int, agents: VisionAgents) -> tuple[str, int]:
    """The text of a sequence with «drawn» turns, and the tokens before each of these, together."""
    there = batch.batch["attention_mask"][row].bool()
    ids = batch.batch["input_ids"][row][there].tolist()
    prompt = torch.zeros_like(batch.batch["prompts"][row])
    mask = torch.cat([prompt, batch.batch["response_mask"][row]])[there].tolist()
    pieces: list[tuple[int, list[int]]] = []
    before = 0
    for place, (token, drawn) in enumerate(zip(ids, mask, strict=True)):
        if not pieces or pieces[-1][0] != drawn:
            pieces.append((drawn, []))
            before += place * drawn
        pieces[-1][1].append(token)
    text = ""
    for drawn, piece in pieces:
        end = "<eos>" if drawn and piece[-1] in ENDS else ""
        text += f"«{letters(piece)}»{end}" if drawn else agents.tokenizer.decode(piece)
    return text, before


def believed(talk: list[Any], agents: VisionAgents, opening: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What Transformers' template and image processor make of a conversation."""
    messages, images = [], []
    for role, parts in talk:
        made = []
        for part in parts:
            if isinstance(part, str):
                made.append({"type": "text", "text": f"{opening}«{part}»" if role == "drawn" else part})
            else:
                images.append(Image.open(io.BytesIO(base64.b64decode(part["image"]))))
                made.append({"type": "image"})
        messages.append({"role": "assistant" if role == "drawn" else role, "content": made})
    text = agents.tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = agents.processor.image_processor(images=images, return_tensors="pt")
    begin, *rest = text.split("<|image_pad|>")
    counts = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
    text = begin + "".join("<|image_pad|>" * count + after for count, after in zip(counts, rest, strict=True))
    return text, inputs


def installed(program: str) -> Any:
    package = PACKAGES[program.split("_")[0]]
    missing = importlib.util.find_spec(package) is None
    return pytest.param(program, marks=pytest.mark.skipif(missing, reason=f"no {package}: make test-agent-kits"))


@pytest.mark.parametrize("program", map(installed, PROGRAMS))
def test_pictures_of_the_user_and_of_a_tool(agents, program):
    batch = agents.answer(agents.prompts(picture_rows(1, text_every=1), n=1, agent_name=[program]))
    more = batch.non_tensor_batch
    assert set(more["trajectory_message"]) == {""}
    talks, tokens = json.loads(more["agent_answer"][0])
    assert len(batch) == len(talks) == (2 if program == "smolagents" else 1)
    before = 0
    for row, talk in enumerate(talks):
        text, inputs = believed(talk, agents, OPENING if program == "smolagents" else "")
        said, prompts = recorded(batch, row, agents)
        assert said.removesuffix("<eos>") == text.removesuffix("<eos>")
        before += prompts
        shown = more["multi_modal_inputs"][row]
        for name in ("pixel_values", "image_grid_thw"):
            assert torch.equal(shown[name], inputs[name])
    pictures = sum(not isinstance(part, str) for _, parts in talks[-1] for part in parts)
    assert pictures == (1 if program == "openai_agents_chat_streamed" else 2)
    drawn = batch.batch["response_mask"].bool()
    assert tokens == [before, int(drawn.sum())]
    assert_close(batch.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(batch)[drawn], atol=1e-5, rtol=0)


HUGE = png(Image.new("1", (8000, 8001)))
BAD = {
    image_programs.PNG + "AAAA": "it is no image file",
    "http://127.0.0.1:9/a.png": "no addresses and no files|no address and no file",
    image_programs.PNG + base64.b64encode(HUGE).decode(): "8000 x 8001 pixels, and 64000000 are the most",
}
SEND_URLS = [program for program in PROGRAMS if program != "smolagents"]


@pytest.mark.parametrize("reason", BAD.values(), ids=["broken", "remote", "huge"])
@pytest.mark.parametrize("program", map(installed, SEND_URLS))
def test_a_bad_picture_ends_the_agent_with_the_reason(agents, program, reason):
    [row] = picture_rows(1, text_every=1)
    row["extra_info"]["shown"] = next(url for url, said in BAD.items() if said == reason)
    batch = agents.answer(agents.prompts([row], n=1, agent_name=[program]))
    [message] = batch.non_tensor_batch["trajectory_message"]
    assert re.search(reason, message)
    assert re.search("Error code: 400|status_code: 400", message)


@pytest.mark.parametrize("program", map(installed, PROGRAMS))
def test_a_policy_for_text_says_so(serve, program):
    calculator = serve(calculates, prompt_length=30_000, response_length=30_000)
    access = calculator.access
    urls = {"base_url": access.base_url, "anthropic_base_url": access.root}
    task = ProgramTask(messages=[], row={}, api_key=access.api_key, **urls)

    async def run():
        found = getattr(image_programs, program)(task)
        return await found if inspect.isawaitable(found) else found

    with pytest.raises(Exception, match="the policy reads no images"):
        asyncio.run(run())
    assert calculator.recorder.outputs() == []
