"""Rows with tool calls, descriptions of tools and switches: the model sees what the row says, in every format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.chat_templates import chat_tokenizer
from verl.config import DataConfig, PreferenceDataConfig, SFTDataConfig
from verl.datasets import MultiTurnSFTDataset, RLHFDataset, RMDataset, SFTDataset
from verl.datasets.files import DataFile
from verl.datasets.row_conversation import row_messages
from verl.datasets.template_probes import TemplateForms
from verl.errors import DataError
from verl.plugins.endpoint.program_agent import _prompt

CHATML = chat_tokenizer("chatml")


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments)]},
        {"role": "tool", "content": "21", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "It is 21."},
    ]


def tool(**parameters: Any) -> dict[str, Any]:
    function = {"name": "f", "description": "-", "parameters": {"type": "object", "properties": parameters}}
    return {"type": "function", "function": function}


def conversations(path: Path, rows: list[dict[str, Any]], tokenizer: Any = CHATML, **changes: Any) -> Any:
    return MultiTurnSFTDataset(written(path, rows), tokenizer, SFTDataConfig(**{"max_length": 2000, **changes}))


def prompts(path: Path, rows: list[dict[str, Any]], tokenizer: Any = CHATML, **changes: Any) -> Any:
    settings = {"max_prompt_length": 1000, "return_raw_input_ids": True, "shuffle": False, **changes}
    return RLHFDataset(written(path, rows), tokenizer, DataConfig(**settings))


def pairs(path: Path, rows: list[dict[str, Any]], tokenizer: Any = CHATML, **changes: Any) -> Any:
    return RMDataset(written(path, rows), tokenizer, PreferenceDataConfig(**{"max_length": 2000, **changes}))


# ---- parquet: keys of other rows ------------------------------------------------------------------------------------

LEAVES = {
    "city": st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=6),
    "day": st.integers(-9, 9),
    "hot": st.booleans(),
    "list": st.lists(st.integers(0, 3), max_size=2),
}


def objects(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the keys of one type, in its order: what a column of parquet can hold."""
    fields = dict(LEAVES)
    if depth:
        fields |= {"deep": objects(depth - 1), "many": st.lists(objects(depth - 1), max_size=2)}
    return st.fixed_dictionaries({}, optional=fields).map(
        lambda found: {key: found[key] for key in fields if key in found}
    )


def every_key(depth: int) -> dict[str, Any]:
    deeper = {"deep": every_key(depth - 1), "many": [every_key(depth - 1)]} if depth else {}
    return {"city": "Rome", "day": 1, "hot": True, "list": [1]} | deeper


ROWS = st.lists(
    st.fixed_dictionaries({"calls": st.lists(objects(2), max_size=2), "free": objects(2)}), min_size=1, max_size=4
)


@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_rows_of_parquet_are_those_of_jsonl(tmp_path: Path, drawn: list[dict[str, Any]]):
    rows = []
    # The first row sets the order of keys, which a column of parquet has one of.
    for one in [{"calls": [every_key(2)], "free": every_key(2)}, *drawn]:
        turns = [{"role": "assistant", "content": "a", "tool_calls": [call(arguments) for arguments in one["calls"]]}]
        messages = [{"role": "user", "content": "Hi"}, *turns, {"role": "user", "content": "Go"}]
        free = {"f": {"create_kwargs": one["free"]}}
        rows.append(
            {
                "messages": [*messages, {"role": "assistant", "content": "b"}],
                "prompt": messages,
                "tools": [tool(a={"type": "string", "default": one["free"]})],
                "interaction_kwargs": {"name": "f", **one["free"]},
                "extra_info": {"tools_kwargs": free, "environment_kwargs": one["free"], "deep": {"x": [one["free"]]}},
                "own": [one["free"]],
            }
        )
    table, lines = (prompts(tmp_path / f"x{suffix}", rows) for suffix in (".parquet", ".jsonl"))
    for item in range(len(rows)):
        ours, theirs = table[item], lines[item]
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            is_equal = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
            assert is_equal, (name, value, theirs[name])
    table, lines = (conversations(tmp_path / f"x{suffix}", rows) for suffix in (".parquet", ".jsonl"))
    for item in range(len(rows)):
        assert table.texts(item) == lines.texts(item)
        assert table[item]["input_ids"].tolist() == lines[item]["input_ids"].tolist()


def test_a_call_is_trained_on_without_the_arguments_of_other_rows(tmp_path: Path):
    rows = [
        {"messages": calling({"city": "Rome"}), "tools": [tool(city={"type": "string"})]},
        {"messages": calling({"ticker": "X", "day": 3}), "tools": [tool(day={"type": "integer", "default": 3})]},
    ]
    text = conversations(tmp_path / "x.parquet", rows).texts(0)[0]
    assert '"arguments": {"city": "Rome"}}' in text
    assert '"properties": {"city": {"type": "string"}}' in text


def test_what_nulls_of_a_file_mean(tmp_path: Path):
    rows = [
        {"extra_info": {"answer": None, "deep": {"a": None, "b": [None, 1]}}, "own": {"a": None, "b": 2}, "c": None},
        {"extra_info": {"answer": "x", "deep": {"a": 3, "b": [2]}}, "own": {"a": 1, "b": None}, "c": 4},
    ]
    table = DataFile(Path(written(tmp_path / "x.parquet", rows)))
    # The row's own columns and the keys of extra_info are a table's; below them a null is no key; lists keep theirs.
    assert table.row(0) == {"extra_info": {"answer": None, "deep": {"b": [None, 1]}}, "own": {"b": 2}, "c": None}
    assert list(table.column("own")) == [{"b": 2}, {"a": 1}]
    assert DataFile(Path(written(tmp_path / "x.jsonl", rows))).row(0) == rows[0]  # where they were written


# ---- arguments of tool calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chatml", "llama", "deepseek", "glm", "mistral", "gpt_oss"])
def test_arguments_as_json_text_are_those_of_an_object(tmp_path: Path, family: str):
    tokenizer = chat_tokenizer(family)
    arguments = {"city": "Rome é", "days": [1, None]}
    bare = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": json.dumps(arguments)}]}
    of_text, of_object = calling('{"city":"Rome \\u00e9","days":[1,null]}'), calling(arguments)
    texts = [
        conversations(tmp_path / "x.jsonl", [{"messages": messages}], tokenizer).texts(0)
        for messages in (of_object, of_text)
    ]
    assert texts[0] == texts[1]
    assert "\\u00e9" not in texts[0][0]
    assert "\\\\" not in texts[0][0]
    asked = {"role": "user", "content": "Why?"}
    shown = [prompts(tmp_path / "x.jsonl", [{"prompt": [*m, asked]}], tokenizer).texts(0) for m in (of_object, of_text)]
    assert shown[0] == shown[1]
    sides = [
        pairs(tmp_path / "x.jsonl", [{"prompt": "Hi", "chosen": m[1:], "rejected": "No."}], tokenizer).texts(0)
        for m in (of_object, of_text)
    ]
    assert sides[0] == sides[1]
    whole = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert row_messages([asked, bare], "-")[1]["tool_calls"] == [whole]


def test_agent_programs_get_arguments_as_their_clients_send_them():
    raw_prompt = row_messages(calling('{"city":"Rome"}'), "-")
    messages, _ = _prompt({"raw_prompt": raw_prompt}, None)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Rome"}'}


def test_what_templates_take():
    text = {
        name: TemplateForms.from_tokenizer(chat_tokenizer(name)).text_arguments
        for name in ("chatml", "glm", "deepseek")
    }
    assert text == {"chatml": False, "glm": False, "deepseek": True}
    writes = {
        name: TemplateForms.from_tokenizer(chat_tokenizer(name)).writes_tools
        for name in ("chatml", "mistral", "gemma", "phi")
    }
    assert writes == {"chatml": True, "mistral": True, "gemma": False, "phi": False}
    calls = {
        name: TemplateForms.from_tokenizer(chat_tokenizer(name)).writes_calls
        for name in ("chatml", "deepseek", "gemma", "phi")
    }
    assert calls == {"chatml": True, "deepseek": True, "gemma": False, "phi": False}
    tokenizer = copy.deepcopy(CHATML)
    assert TemplateForms.from_tokenizer(tokenizer).writes_tools
    tokenizer.chat_template = chat_tokenizer("phi").chat_template  # another one is looked at again
    assert not TemplateForms.from_tokenizer(tokenizer).writes_tools


@pytest.mark.parametrize("empty", ["", None, "{}", {}])
def test_a_call_without_arguments(empty: Any):
    [message] = row_messages([{"role": "assistant", "tool_calls": [call(empty)]}], "-")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"tool_calls": [call('{"city": ')]}, "message 1: call 0: the arguments of f are not valid JSON"),
        ({"tool_calls": [call('{"degrees": NaN}')]}, "the arguments of f are not valid JSON (NaN is no JSON)"),
        ({"tool_calls": [call("[1]")]}, "call 0: the arguments of f are list [1]. Expected an object"),
        ({"tool_calls": [call({}), {"function": {}}]}, "message 1: call 1 is dict"),
        ({"tool_calls": "{}}"}, "message 1: tool_calls are not valid JSON"),
        ({"tool_calls": {"f": 1}}, "message 1: tool_calls is dict"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "message 1 has function_call, which chat templates do"),
    ],
)
def test_calls_that_cannot_be_read_name_their_row(tmp_path: Path, message: dict[str, Any], says: str):
    good, bad = calling({}), calling({})
    bad[1] = {"role": "assistant", "content": "", **message}
    with pytest.raises(DataError) as caught:
        conversations(tmp_path / "x.jsonl", [{"messages": good}, {"messages": bad}])
    assert "x.jsonl, row 1" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("open_", [prompts, conversations, pairs])
def test_calls_that_the_template_would_leave_out(tmp_path: Path, open_: Any):
    asked, answer = calling({"a": 1})[:2]
    row = {"prompt": [asked, answer, asked], "messages": [asked, answer], "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=r"row 0 has tool calls, and the chat template of .* does not write them"):
        open_(tmp_path / "x.jsonl", [row], chat_tokenizer("gemma"))


# ---- tools and thinking ---------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "Hi"}]
SHOWN = '<tools>\n{"type": "function", "function": {"name": "f"'


def test_a_prompt_shows_the_tools_and_the_thinking_of_its_row(tmp_path: Path):
    one = tool(city={"type": "string"})
    as_text = {
        "type": "function",
        "function": one["function"] | {"parameters": json.dumps(one["function"]["parameters"])},
    }
    rows = [
        {"prompt": ASKED, "tools": value}
        for value in ([one], json.dumps([one]), [json.dumps(one)], [as_text], None, [])
    ]
    opened = prompts(tmp_path / "x.jsonl", rows)
    texts = [opened.texts(item)[0] for item in range(len(rows))]
    assert SHOWN in texts[0]
    assert texts[1:4] == [texts[0]] * 3
    assert texts[4] == texts[5] == prompts(tmp_path / "y.jsonl", [{"prompt": ASKED}]).texts(0)[0]
    assert CHATML.decode(opened[0]["raw_prompt_ids"]) == texts[0]
    assert opened[0]["tools"] == [one]  # still a column
    assert prompts(tmp_path / "x.jsonl", rows, tools_key=None).texts(0)[0] == texts[4]
    thinking = chat_tokenizer("chatml_thinking")
    rows = [{"prompt": ASKED, "enable_thinking": value} for value in (False, True, None, 0)]
    opened = prompts(tmp_path / "x.jsonl", rows, thinking)
    assert ["</think>" in opened.texts(item)[0] for item in range(4)] == [True, False, False, True]
    assert prompts(tmp_path / "x.jsonl", rows, thinking, enable_thinking_key=None).texts(0) == opened.texts(1)


def test_pairs_show_them_on_both_sides(tmp_path: Path):
    row = {"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "tools": [tool()]}
    opened = pairs(tmp_path / "x.jsonl", [row])
    assert [SHOWN in text for text in opened.texts(0)] == [True, True]
    assert CHATML.decode(opened[0]["input_ids"][0]).startswith(opened.texts(0)[0].rstrip())


@pytest.mark.parametrize("open_", [prompts, conversations, pairs])
def test_rows_whose_tools_nobody_would_see(tmp_path: Path, open_: Any):
    row = {"prompt": ASKED, "messages": [*ASKED, {"role": "assistant", "content": "b"}], "chosen": "b", "rejected": "c"}
    rows = [row, row | {"tools": [tool()]}]
    with pytest.raises(DataError, match=r"x.jsonl, row 1 has tools, and the chat template of .* does not write tools"):
        open_(tmp_path / "x.jsonl", rows, chat_tokenizer("gemma"))
    assert len(open_(tmp_path / "x.jsonl", rows, chat_tokenizer("gemma"), tools_key=None)) == 2
    for value, says in ((["calculator"], "tools[0] are not valid JSON"), ({"a": 1}, "the tools are dict, not a list")):
        with pytest.raises(DataError) as caught:
            open_(tmp_path / "x.jsonl", [row | {"tools": value}])
        assert says in str(caught.value)
    with pytest.raises(DataError, match=r"row 0: enable_thinking is str 'false'. Expected true or false"):
        open_(tmp_path / "x.jsonl", [row | {"enable_thinking": "false"}])


def test_tools_of_rows_beside_those_of_the_run(tmp_path: Path):
    own = {"apply_chat_template_kwargs": {"tools": [tool()]}}
    with pytest.raises(DataError, match=r"row 0 has tools, but the prompts already show the tools of the run"):
        prompts(tmp_path / "x.jsonl", [{"prompt": ASKED, "tools": [tool()]}], **own)


# ---- what is trained on ---------------------------------------------------------------------------------------------


def learned(dataset: Any) -> str:
    item = dataset[0]
    return CHATML.decode(item["input_ids"][item["loss_mask"].bool()])


def talk(**first: Any) -> list[dict[str, Any]]:
    answers = ({"role": "assistant", "content": "one"} | first, {"role": "assistant", "content": "two"})
    return [ASKED[0], answers[0], {"role": "user", "content": "More"}, answers[1]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("switch", "text"),
    [
        ({}, "one<|im_end|>two<|im_end|>"),
        ({"loss_mask": 0}, "two<|im_end|>"),
        ({"weight": 0}, "two<|im_end|>"),
        ({"weight": 0.0}, "two<|im_end|>"),
        ({"trainable": False}, "two<|im_end|>"),
        ({"trainable": False, "weight": 0}, "two<|im_end|>"),
        ({"trainable": True}, "one<|im_end|>two<|im_end|>"),
        ({"loss_mask": 1}, "one<|im_end|>two<|im_end|>"),
    ],
)
def test_messages_that_are_not_trained_on(tmp_path: Path, switch: dict[str, Any], text: str, suffix: str):
    assert learned(conversations(tmp_path / f"x{suffix}", [{"messages": talk(**switch)}])) == text


def test_answers_inside_a_prompt_are_context(tmp_path: Path):
    path = written(tmp_path / "x.jsonl", [{"prompt": talk(weight=1)[:3], "response": "two"}])
    settings = SFTDataConfig(max_length=400, prompt_key="prompt", response_key="response")
    assert learned(SFTDataset(path, CHATML, settings)) == "two<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (talk(weight=0.5), "message 1: weight is 0.5. Expected 1 or true"),
        (talk(loss_mask="no"), "message 1: loss_mask is 'no'"),
        (talk(weight=0, trainable=True), "message 1: weight=0 and trainable=True contradict each other"),
        (talk(train=False), "message 1 has 'train', which is not read"),
        (talk(**{"loss-mask": 0}), "message 1 has 'loss-mask', which is not read"),
        ([ASKED[0] | {"weight": 1}, *talk()[1:]], "message 0 has weight, and the role user. The loss is on what"),
        ([*talk(weight=0)[:2]], "no message of the assistant is trained on"),
    ],
)
def test_switches_that_cannot_be_honoured(tmp_path: Path, messages: list[dict[str, Any]], says: str):
    with pytest.raises(DataError) as caught:
        conversations(tmp_path / "x.jsonl", [{"messages": messages}])
    assert f"x.jsonl, row 0: {says}" in str(caught.value)


def test_pairs_compare_whole_responses(tmp_path: Path):
    row = {
        "prompt": talk(weight=0)[:3],
        "chosen": "b",
        "rejected": [{"role": "assistant", "content": "c", "weight": 0}],
    }
    with pytest.raises(DataError, match=r"row 0, rejected: a message of the response is not to be trained on"):
        pairs(tmp_path / "x.jsonl", [row])
    assert len(pairs(tmp_path / "x.jsonl", [row | {"rejected": "c"}])) == 1  # in the prompt it says what is so anyway
