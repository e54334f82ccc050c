"""Tool calls rendered as the public chat templates do come back equal; broken ones are reported, never raised."""

from __future__ import annotations

import asyncio
import json
import keyword
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.support.chat_templates import chat_tokenizer
from verl.agents.parsers import FunctionCall, ToolParser, get_tool_parser
from verl.agents.parsers.base import _parsers
from verl.agents.parsers.tagged import typed
from verl.compat.toolkit.harmony import add_generation_prompt_for_gpt_oss, format_gpt_oss_tool_response_manually
from verl.errors import ConfigError
from verl.testing.models import tiny_tokenizer

SPECIALS = (
    "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|eot_id|>", "<|python_tag|>", "</s>",
    "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|observation|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
    "<|constrain|>", "<|python_start|>", "<|python_end|>", "<|eot|>",
)  # fmt: skip
PLAIN = (
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    "｜DSML｜",
    "{",
    "}",
    '"name": ',
    "```json",
    "(",
)
Call = tuple[str, dict[str, Any]]
Render = Callable[[str, list[Call]], str]


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer("bpe")
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return made


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def hermes(content: str, calls: list[Call]) -> str:
    blocks = [f"<tool_call>\n{to_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    return "\n".join([content, *blocks]).lstrip("\n") + "<|im_end|>"


def llama3(content: str, calls: list[Call]) -> str:
    return "; ".join(to_json({"name": n, "parameters": a}) for n, a in calls) + "<|eot_id|>"


def mistral_list(content: str, calls: list[Call]) -> str:
    listed = [{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls]
    return f"{content}[TOOL_CALLS]{to_json(listed)}</s>"


def mistral_args(content: str, calls: list[Call]) -> str:
    return content + "".join(f"[TOOL_CALLS]{n}[ARGS]{to_json(a)}" for n, a in calls) + "</s>"


def qwen3_coder(content: str, calls: list[Call]) -> str:
    text = content
    for name, arguments in calls:
        text += f"\n<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            # The template writes what is neither a mapping nor a list as Python does.
            shown = to_json(value) if isinstance(value, dict | list) else str(value)
            text += f"<parameter={key}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text + "<|im_end|>"


def deepseek_v3(content: str, calls: list[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{to_json(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return f"{content}<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek_v31(content: str, calls: list[Call]) -> str:
    blocks = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{to_json(a)}<｜tool▁call▁end｜>" for n, a in calls]
    return f"{content}<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek_dsml(content: str, calls: list[Call]) -> str:
    text = f"{content}\n\n<｜DSML｜function_calls>\n"
    for name, arguments in calls:
        text += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            is_text = str(isinstance(value, str)).lower()
            text += f'<｜DSML｜parameter name="{key}" string="{is_text}">{as_text(value)}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n"
    return text + "</｜DSML｜function_calls><｜end▁of▁sentence｜>"


def glm(content: str, calls: list[Call]) -> str:
    text = content
    for name, arguments in calls:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in arguments.items())
        text += f"\n<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    return text + "<|observation|>"


def gpt_oss(content: str, calls: list[Call]) -> str:
    messages = ["<|channel|>analysis<|message|>I need a tool.<|end|>"]
    if content:
        messages.append(f"<|channel|>commentary<|message|>{content}<|end|>")
    messages += [
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{to_json(a)}<|call|>" for n, a in calls
    ]
    return "<|start|>assistant".join(messages)


def pythonic(content: str, calls: list[Call]) -> str:
    shown = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(shown)}]<|eot|>"


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(keyword.kwlist)
KEYS = st.from_regex(r"k_[a-z0-9]{0,4}", fullmatch=True) | st.sampled_from(keyword.kwlist)
ANY_TEXT = st.text(max_size=30) | st.sampled_from(SPECIALS + PLAIN)
UNMARKED_TEXT = st.text(max_size=30).filter(lambda text: not set(text) & set("<｜") and text == text.strip("\n"))


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.none() | st.booleans() | numbers | texts
    return st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3), max_leaves=6)


def conversations(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[Call]]:
    arguments = st.dictionaries(KEYS, values(texts), max_size=4)
    return st.lists(st.tuples(NAMES, arguments), min_size=1, max_size=3)


def schemas(calls: list[Call]) -> list[dict[str, Any]]:
    """Tools whose parameters have the types of these calls' arguments; each call gets a tool of its own."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kinds[type(None)] = "null"
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kinds[type(value)]} for key, value in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]


CONTENT = "Let me look that up."
FORMATS: dict[str, tuple[str, Render, bool, bool]] = {
    # format: parser, how it is written, whether arguments may hold any text, whether text may stand before the calls
    "hermes": ("hermes", hermes, True, True),
    "llama3_json": ("llama3_json", llama3, True, False),
    "mistral, list": ("mistral", mistral_list, True, True),
    "mistral, [ARGS]": ("mistral", mistral_args, True, True),
    "qwen3_coder": ("qwen3_coder", qwen3_coder, False, True),
    "deepseek v3": ("deepseek", deepseek_v3, True, True),
    "deepseek v3.1": ("deepseek", deepseek_v31, True, True),
    "deepseek v3.2": ("deepseek", deepseek_dsml, False, True),
    "glm": ("glm", glm, False, True),
    "gpt-oss": ("gpt-oss", gpt_oss, True, True),
    "pythonic": ("pythonic", pythonic, True, False),
}


def parse(tokenizer: Any, name: str, text: str, tools: Any = None, **options: Any) -> Any:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return asyncio.run(get_tool_parser(name, tokenizer).parse(ids, tools, **options))


@pytest.mark.parametrize("format_", FORMATS)
def test_calls_come_back_as_they_were_written(tokenizer, format_: str):
    name, render, takes_any_text, has_content = FORMATS[format_]

    @given(conversations(ANY_TEXT if takes_any_text else UNMARKED_TEXT), st.booleans())
    @settings(max_examples=20)
    def check(calls: list[Call], with_content: bool) -> None:
        calls = list({call[0]: call for call in calls}.values())
        content = CONTENT if with_content and has_content else ""
        turn = parse(tokenizer, name, render(content, calls), schemas(calls))
        assert turn.malformed == []
        assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == calls
        assert turn.content == content
        assert turn.thinking == ("I need a tool." if name == "gpt-oss" else "")

    check()


@pytest.mark.parametrize("name", _parsers.names())
def test_no_text_makes_a_parser_raise(tokenizer, name: str):
    pieces = st.lists(st.sampled_from(SPECIALS + PLAIN) | st.text(max_size=8), max_size=12).map("".join)
    written = [hermes("", [("f", {"a": [1, "x"]})]), *(one[1]("t", [("f", {"k_1": 2})]) for one in FORMATS.values())]
    cut = st.tuples(st.sampled_from(written), st.integers(0, 200), pieces).map(lambda x: x[0][: x[1]] + x[2])

    @given(pieces | cut)
    @settings(max_examples=60)
    def check(text: str) -> None:
        turn = parse(tokenizer, name, text)
        for call in turn.calls:
            assert isinstance(json.loads(call.arguments), dict)
            call.model_dump_json().encode()
        assert all(one.reason and one.text for one in turn.malformed)

    check()
    for hostile in ("[" * 100_000, '{"name":' * 50_000, "<tool_call>" * 20_000, "[f(a=" + "-" * 50_000 + "1)]"):
        parser: Any = get_tool_parser(name, tokenizer)
        for text in (hostile, f"<tool_call>{hostile}", f"[TOOL_CALLS]{hostile}", f"<|python_tag|>{hostile}"):
            assert parser.parse_text(text).calls == []


BROKEN = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "expected '</tool_call>' at character 47"),
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "invalid JSON: Expecting value at character 44"),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "no 'arguments', only 'name', 'parameters'"),
        ('<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "must be a JSON object, not str 'a'"),
        ('<tool_call>{"name": "f", "arguments": "{} a"}</tool_call>', "'a' follows the JSON object in the text of"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "must be a text, not 3"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "cannot be written as JSON"),
        ("<tool_call></tool_call>", "invalid JSON: Expecting value"),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}', "invalid JSON"),
        ('<|python_tag|>brave_search.call(query="x")', "invalid JSON"),
        ('{"name": "Rome"}', "no 'parameters', and 'Rome' is no tool"),
        ('{"name": "f", "parameters": {}} and more', "expected ';' at character 32, but found 'and more'"),
    ],
    "mistral": [("[TOOL_CALLS][]", "the list of calls is empty"), ("[TOOL_CALLS]f{}", "no [ARGS] follows")],
    "qwen3_coder": [
        ("<tool_call>\nf(1)\n</tool_call>", "no <function=name> follows <tool_call>"),
        ("<tool_call><function=f><parameter=a>1", "no '</parameter>' ends the value of 'a'"),
        (
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "'a' is written twice",
        ),
        ("<tool_call><function=f\n<parameter=a>1</parameter></function>", "no '>' ends the name of the function"),
        ("<tool_call><function=f", "no '>' ends the name of the function"),
    ],
    "deepseek": [
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "no <｜tool▁sep｜> in the call"),
        ("<｜tool▁calls▁begin｜>f(1)<｜tool▁calls▁end｜>", "no <｜tool▁call▁begin｜> follows"),
        (
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter>'
            '<｜DSML｜parameter name="a">2</｜DSML｜parameter></｜DSML｜invoke>',
            "'a' is written twice",
        ),
        ('<｜DSML｜invoke name="f">x</｜DSML｜invoke>', "neither a parameter nor </｜DSML｜invoke>"),
    ],
    "glm": [
        ("<tool_call>f\n<arg_key>a</arg_key></tool_call>", "expected '<arg_value>'"),
        (
            "<tool_call>f<arg_key>a<arg_value>1</arg_value><arg_key>b</arg_key></tool_call>",
            "no '</arg_key>' ends a key",
        ),
    ],
    "gpt-oss": [
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", "'python' is no function: write to=functions.name"),
        ("<|channel|>commentary to=functions.f<|message|>{} x<|call|>", "'x' follows the JSON object"),
    ],
    "pythonic": [
        ("[f(a=1, a=2)]", "the parameter 'a' is written twice"),
        ("[f(1)]", "an argument of f has no name: write f(key=value)"),
        ("[f(a=open('x'))]", "the value of 'a' is no literal"),
        ("[f(a=1]", "no Python expression"),
        ("[f(a=1) + 3]", "'f(a=1) + 3' in the list is no call"),
    ],
}


@pytest.mark.parametrize(("name", "text", "reason"), [(n, *case) for n, cases in BROKEN.items() for case in cases])
def test_a_broken_call_is_reported_with_the_reason(tokenizer, name: str, text: str, reason: str):
    turn = parse(tokenizer, name, text)
    assert turn.calls == []
    assert len(turn.malformed) == 1
    assert reason in turn.malformed[0].reason
    # The message keeps the text, for it is no call.
    assert turn.malformed[0].text.strip().removesuffix("<|call|>") in text
    assert turn.content == text.strip().removesuffix("<|call|>")


TWO = schemas([("f", {"a": "", "b": 0})])
READ = [
    # The end of the value of ``a`` is left out: what follows is no part of it.
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
    ),
    ("qwen3_coder", "<function=f>\n<parameter=b>\n2\n</parameter>\n<parameter=a>\n1\n</function>"),
    (
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1\n<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    ("glm", "<tool_call>f<arg_key>b</arg_key><arg_value>2<arg_key>a</arg_key><arg_value>1\n</tool_call>"),
    (
        "deepseek",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1\n'
        '<｜DSML｜parameter name="b" string="false">2'
        "</｜DSML｜parameter></｜DSML｜invoke>",
    ),
    # Arguments as the text of JSON.
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"1\", \"b\": 2}"}</tool_call>'),
    ("llama3_json", r'{"name": "f", "parameters": "{\"a\": \"1\", \"b\": 2}"}'),
]


@pytest.mark.parametrize(("name", "text"), READ)
def test_calls_that_are_written_otherwise_than_the_template_does(tokenizer, name: str, text: str):
    turn = parse(tokenizer, name, text, TWO)
    assert turn.malformed == []
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == [("f", {"a": "1", "b": 2})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]'),
        ("llama3_json", '{"name": "f"}'),
    ],
)
def test_calls_without_arguments(tokenizer, name: str, text: str):
    assert parse(tokenizer, name, text, TWO).calls == [FunctionCall(name="f", arguments="{}")]


def test_an_end_tag_inside_a_value_that_has_its_own_end(tokenizer):
    value = "<function=f>1</function> and </tool_call>"
    for name, text in (
        ("qwen3_coder", f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"),
        ("glm", f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}.</arg_value></tool_call>"),
    ):
        [call] = parse(tokenizer, name, text).calls
        assert json.loads(call.arguments)["a"].startswith(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": }</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[TOOL_CALLS]g[ARGS]{}"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("qwen3_coder", "<function=f>1</function><function=g></function>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</tool_call>\n<tool_call>\n<function=g></function>"),
        ("mistral", '[TOOL_CALLS][{"name": 3}, {"name": "g", "arguments": {}}]'),
        ("pythonic", "[class(a=open('x')), g()]"),
    ],
)
def test_a_broken_call_does_not_take_the_next_one_with_it(tokenizer, name: str, text: str):
    turn = parse(tokenizer, name, text)
    assert turn.calls == [FunctionCall(name="g", arguments="{}")]
    [malformed] = turn.malformed
    assert malformed.text in text
    assert malformed.text.strip() in turn.content


def test_signs_of_numbers(tokenizer):
    text = "[f(a=+5, b=+2.5, c=-1, d=[+1, {'x': +0.5}]), g(a=True)]"
    turn = parse(tokenizer, "pythonic", text)
    assert turn.malformed == []
    arguments = [json.loads(call.arguments) for call in turn.calls]
    assert arguments == [{"a": 5, "b": 2.5, "c": -1, "d": [1, {"x": 0.5}]}, {"a": True}]


def test_only_the_first_broken_calls_are_reported(tokenizer):
    turn = parse(tokenizer, "hermes", "<tool_call>x</tool_call>" * 20)
    assert (len(turn.malformed), turn.content) == (8, "<tool_call>x</tool_call>" * 20)


@pytest.mark.parametrize("name", [name for name in _parsers.names() if name != "gpt-oss"])
def test_a_call_in_the_thinking_is_none(tokenizer, name: str):
    render = next(one[1] for one in FORMATS.values() if one[0] == name)
    call = render("", [("f", {"k_1": "x"})])
    turn = parse(tokenizer, name, f"<think>\nI could write {call}\n</think>\n\n{call}")
    assert (turn.content, [one.name for one in turn.calls]) == ("", ["f"])
    assert turn.thinking.startswith("I could write")
    # The prompt has opened the block: there is no tag to see.
    turn = parse(tokenizer, name, f"I could write {call} </think> Yes.", is_thinking=True)
    assert (turn.content, turn.calls) == ("Yes.", [])
    assert parse(tokenizer, name, f"<think>{call}").calls == []  # the response ended in the middle of it


@pytest.mark.parametrize("name", _parsers.names())
@pytest.mark.parametrize("answer", ["Paris.", '{"answer": 3}', "[1, 2]", "a < b", ""])
def test_an_answer_stays_as_it_is(tokenizer, name: str, answer: str):
    text = f"<|channel|>final<|message|>{answer}<|return|>" if name == "gpt-oss" else answer
    turn = parse(tokenizer, name, text + "<|im_end|>")
    assert (turn.content, turn.calls, turn.malformed) == (answer, [], [])


def test_values_without_types_follow_the_schema():
    cases = [
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "string"}, "12"),
        ("12", None, "12"),
        ("12", {"type": ["integer", "string"]}, 12),
        ("1.5", {"type": ["integer", "string"]}, "1.5"),
        ("7", {"type": "number"}, 7),
        ("+7", {"type": "integer"}, 7),
        ("+2.5", {"type": "number"}, 2.5),
        ("+7", {"type": ["integer", "string"]}, "+7"),
        ("True", {"type": "boolean"}, True),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": "string", "nullable": True}, None),
        ("many", {"type": "integer"}, "many"),
        ("[1]", {"type": "array"}, [1]),
        ("2", {"enum": [1, 2]}, 2),
    ]
    for text, schema, value in cases:
        found = typed(text, schema)
        assert (found, type(found)) == (value, type(value)), (text, schema)


def test_a_parser_of_a_users_own(tokenizer):
    @ToolParser.register("shouted")
    class ShoutedParser(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int]):  # the calling form of older releases
            text = self.tokenizer.decode(responses_ids)
            return "", [FunctionCall(name=text.strip("!"), arguments="{}")]

    turn = parse(tokenizer, "shouted", "HELP!", schemas([("HELP", {})]))
    assert turn.calls == [FunctionCall(name="HELP", arguments="{}")]
    assert isinstance(ToolParser.get_tool_parser("shouted", tokenizer), ShoutedParser)
    with pytest.raises(ConfigError, match=r"unknown tool parser 'hermse'\. Did you mean 'hermes'"):
        get_tool_parser("hermse", tokenizer)
    content, calls = asyncio.run(
        get_tool_parser("hermes", tokenizer).extract_tool_calls(tokenizer.encode(hermes("Hi.", [("f", {"k_1": 1})])))
    )
    assert (content, calls) == ("Hi.", [FunctionCall(name="f", arguments='{"k_1": 1}')])


WRITTEN_BY_TEMPLATES = {
    "chatml": "hermes",
    "chatml_thinking": "hermes",
    "chatml_thinks_first": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "glm": "glm",
    "gpt_oss": "gpt-oss",
}


@pytest.mark.parametrize("family", WRITTEN_BY_TEMPLATES)
def test_calls_in_the_tokens_of_a_chat_template(family: str):
    tokenizer = chat_tokenizer(family)
    arguments = {"k_q": '<a> & é 東京 "x"', "k_n": 3, "k_l": [1.5, None, True]}
    calls = [{"id": "call00000", "type": "function", "function": {"name": "search", "arguments": arguments}}]
    asked = [{"role": "user", "content": "Hi"}]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*asked, turn], tokenize=False)
    assert whole.startswith(prompt)
    drawn = tokenizer.encode(whole, add_special_tokens=False)[len(tokenizer.encode(prompt, add_special_tokens=False)) :]
    parser = get_tool_parser(WRITTEN_BY_TEMPLATES[family], tokenizer)
    is_thinking = parser.is_thinking_after(tokenizer.encode(prompt))
    assert is_thinking == (family == "chatml_thinks_first")
    parsed = asyncio.run(parser.parse(drawn, schemas([("search", arguments)]), is_thinking))
    assert (parsed.malformed, parsed.content, parsed.thinking) == ([], "", "")
    assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == [("search", arguments)]


# The template of gpt-oss writes the address of a call before the channel, where the model draws it after that.
@pytest.mark.parametrize("family", [family for family in WRITTEN_BY_TEMPLATES if family != "gpt_oss"])
def test_a_forced_call_begins_as_the_template_writes_it(family: str):
    tokenizer = chat_tokenizer(family)
    calls = [{"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"k": 3}}}]
    asked = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    written = tokenizer.apply_chat_template([*asked, turn], tokenize=False).removeprefix(prompt)
    parser = get_tool_parser(WRITTEN_BY_TEMPLATES[family], tokenizer)
    for names in (["search"], ["search", "find"]):
        opening = parser.opening(names)
        assert opening is not None
        assert written.rpartition("</think>\n\n")[2].startswith(opening)
        assert ("search" in opening) == (len(names) == 1)


@pytest.mark.parametrize("format_", [name for name in FORMATS if not name.startswith("deepseek")])
def test_what_goes_on_from_the_beginning_of_a_forced_call_is_a_call(tokenizer, format_: str):
    name, render, *_ = FORMATS[format_]
    parser = get_tool_parser(name, tokenizer)
    if format_ == "mistral, list":  # of a tokenizer without the token [ARGS]
        parser = get_tool_parser(name, tiny_tokenizer("bpe"))
    call = ("search", {"k_a": 3})
    for names in (["search"], ["search", "find"]):
        opening = parser.opening(names)
        assert opening is not None
        text = render("", [call])
        parsed = parse(tokenizer, name, opening + text[text.index(opening) + len(opening) :], schemas([call]))
        assert (parsed.malformed, parsed.content) == ([], "")
        assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == [call]


def test_texts_for_loops_that_write_gpt_oss_themselves():
    answer = format_gpt_oss_tool_response_manually("21 C", "weather")
    assert add_generation_prompt_for_gpt_oss(answer) == (
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>21 C<|end|><|start|>assistant"
    )
