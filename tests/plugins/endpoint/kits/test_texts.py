"""Clients and kits that call tools: the training batch, token by token, against what the kit believes was said.

The policy is a tiny model on the engine ``native``. A parser shows a turn's token ids as its text, and makes calls of
them: two at once, then one that fails, then none. So each conversation that a kit holds says which tokens were drawn.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch.testing import assert_close

from tests.agents.one_engine import OneEngine, prompts
from tests.plugins.endpoint.kits import text_programs
from verl.agents.parsers.base import FunctionCall, ToolParser
from verl.base.registry import scoped_registrations

STOPS = range(5, 600, 8)
"""Tokens that end a turn: a random model does not draw the tokenizer's own for long."""
OPENING = "<tool_call>\n"
PROGRAMS = [
    *("openai_chat", "openai_chat_forced", "openai_chat_streamed", "openai_responses", "openai_responses_following"),
    *("anthropic_messages", "anthropic_messages_streamed"),
    *("openai_agents_chat", "openai_agents_chat_streamed", "openai_agents_handing_over"),
    *("openai_agents_responses", "openai_agents_responses_streamed", "openai_agents_responses_following"),
    *("langgraph_chat", "langgraph_chat_streamed", "langgraph_responses", "langgraph_responses_following"),
    *("pydantic_ai_chat", "pydantic_ai_responses", "pydantic_ai_anthropic"),
    *("smolagents_tool_calling", "smolagents_code"),
]
PACKAGES = {"openai_agents": "agents", "langgraph": "langgraph", "pydantic": "pydantic_ai", "smolagents": "smolagents"}
CODE = ("print(2 * 21)", "1 / 0", "final_answer('done')")


def calls_of(turn: int, ids: list[int], tools: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a turn, counted from 0, that drew these tokens."""
    hand_over = next((name for name in tools if name.startswith("transfer_to_")), None)
    if hand_over is not None:
        return [(hand_over, {})]
    if turn == 0 and "double" in tools:
        return [("double", {"number": ids[0]}), ("double", {"number": sum(ids)})]
    if turn == 1 and "halve" in tools:
        return [("halve", {"number": ids[-1]})]
    return [("final_answer", {"answer": "done"})] if "final_answer" in tools else []


class ShowsTokens(ToolParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns = 0

    def opening(self, names: Any) -> str:
        return OPENING

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        turn, self.turns = self.turns, self.turns + 1
        calls = calls_of(turn, responses_ids, names_of(tools or []))
        text = f"«{' '.join(map(str, responses_ids))}»"
        if tools is None and turn < len(CODE):
            text += f"\n<code>\n{CODE[turn]}\n</code>"
        return text, [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]


def names_of(tools: list[dict[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[OneEngine]:
    with scoped_registrations():
        ToolParser.register("shows_tokens")(ShowsTokens)
        yield OneEngine(
            tmp_path_factory.mktemp("kits"),
            "chatml",
            data__max_prompt_length=1500,
            data__max_response_length=1500,
            actor_rollout_ref__rollout__name="native",
            actor_rollout_ref__rollout__stop_token_ids=list(STOPS),
            actor_rollout_ref__rollout__multi_turn__format="shows_tokens",
        )


def believed(
    talk: list[dict[str, Any]], tools: list[Any], first_turn: int, tokenizer: Any
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and mask of a conversation by Transformers' own template and tokenizer; and the tokens of each turn."""
    messages, turns, begun = [], [], []
    opening = tokenizer(OPENING, add_special_tokens=False)["input_ids"]
    for message in talk:
        if message["role"] != "drawn":
            messages.append(message)
            continue
        shown = re.match(r"«([\d ]+)»", message["content"])
        assert shown
        turns.append([int(number) for number in shown[1].split()])
        expected = calls_of(first_turn + len(turns) - 1, turns[-1], names_of(tools))
        assert message["calls"] == [[name, arguments] for name, arguments in expected]
        begun.append(opening if message["forced"] else [])
        messages.append({"role": "assistant", "content": "«drawn»"})
    text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
    first, *others = text.split("«drawn»")
    ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    mask = [0] * len(ids)
    for turn, given, after in zip(turns, begun, others, strict=True):
        assert turn[: len(given)] == given
        assert turn[-1] in (*STOPS, tokenizer.eos_token_id)
        foreign = tokenizer(after.removeprefix("<|im_end|>"), add_special_tokens=False)["input_ids"]
        ids += turn + foreign
        mask += [0] * len(given) + [1] * (len(turn) - len(given)) + [0] * len(foreign)
    last = len(foreign)  # what the template writes after the last turn
    return ids[: len(ids) - last], mask[: len(mask) - last], turns


def installed(program: str) -> Any:
    package = next((package for name, package in PACKAGES.items() if program.startswith(name)), "openai")
    missing = importlib.util.find_spec(package) is None
    return pytest.param(program, marks=pytest.mark.skipif(missing, reason=f"no {package}: make test-agent-kits"))


@pytest.mark.parametrize("program", map(installed, PROGRAMS))
def test_the_batch_is_the_conversation_that_the_kit_believes_it_had(engine, tmp_path, program):
    entry = f"- {{name: mine, _target_: program_agent, program: {text_programs.__name__}.{program}}}"
    (tmp_path / "loops.yaml").write_text(entry)
    batch = engine.answer(prompts([program]), tmp_path / "loops.yaml", trajectory_timeout_s=600)
    more, tokenizer = batch.non_tensor_batch, engine.tokenizer
    assert set(more["trajectory_message"]) == {""}
    talks, tokens = json.loads(more["agent_answer"][0])
    assert len(batch) == len(talks) == {"openai_agents_handing_over": 2}.get(program, 3 if "smol" in program else 1)
    before = count = 0
    for row, talk in enumerate(talks):
        there = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][there].tolist()
        response = batch.batch["attention_mask"][row][-batch.batch["responses"].shape[1] :].bool()
        drawn = batch.batch["response_mask"][row][response].tolist()
        drawn = [0] * (len(ids) - len(drawn)) + drawn
        # What the kit tells of its tools is compared with their signatures; the rest of the system message is exact.
        listed = re.search(r"<tools>\n(.*?)\n</tools>", tokenizer.decode(ids), re.DOTALL)
        tools = [json.loads(line) for line in listed[1].split("\n")] if listed else []
        for tool in tools:
            if tool["function"]["name"] in ("double", "halve"):
                assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
                assert "a number" in tool["function"]["description"]
        expected_ids, expected_mask, turns = believed(talk, tools, count, tokenizer)
        assert ids == expected_ids
        assert drawn == expected_mask
        count += len(turns)
        begins = [place for place, (a, b) in enumerate(zip([0, *drawn], drawn, strict=False)) if b > a]
        assert len(begins) == len(turns)
        before += sum(begins)
    assert count == (2 if program == "openai_agents_handing_over" else 3)
    agents = ["main", "checker"] if program == "openai_agents_handing_over" else ["main"] * len(batch)
    assert list(more["agent"]) == agents
    drawn = batch.batch["response_mask"].bool()
    assert tokens == [before, int(drawn.sum())]
    assert_close(batch.batch["rollout_log_probs"][drawn], engine.trainers_log_probs(batch)[drawn], atol=1e-5, rtol=0)
