"""Messages, templates, lengths and cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.datasets.chat import as_messages, encode, render, token_lengths, truncate
from verl.errors import DataError
from verl.testing.models import tiny_tokenizer

USER = {"role": "user", "content": "hi"}


def test_a_string_is_one_user_message():
    assert as_messages("hi", "here") == [USER]


def test_keys_without_value_are_dropped_but_content_stays():
    # Parquet gives every message of a column all keys of the column.
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert as_messages([USER | {"tool_calls": None}, call], "here") == [USER, call]


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert as_messages([{"role": "user", "content": parts}], "here") == [USER]


def test_text_with_brackets_is_text():
    for text in ("[1, 2]", '["role"]', '[{"role": "user"', '{"role": 1}', '[{"role": 1}, 2]'):
        assert as_messages(text, "here") == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "prompt, says",
    [
        (None, "the prompt is NoneType None"),
        ([], "the prompt is list []"),
        (7, "the prompt is int 7"),
        (["hi"], "message 0 is str 'hi'"),
        ([USER, {"content": "x"}], "message 1 has no role"),
        ([{"role": 3, "content": "x"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has content NoneType"),
        ([{"role": "user", "content": 5}], "message 0 has content int 5"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "contains image"),
        ([{"role": "user", "content": []}], "message 0 has content list []"),
        ([{"role": "user", "content": b"hi"}], "message 0 has content bytes b'hi'"),
        ([{"role": "user", "content": ["hi"]}], "message 0 has the part str 'hi'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has the part dict {'type': 'text'}"),
        ([{"role": "user", "content": "a\ud800"}], "message 0 holds half a character, '\\ud800'"),
        ("a\ud800", "holds half a character"),
        ('[{"role": "user", "content": "hi"}]', "messages are JSON text"),
    ],
)
def test_a_malformed_prompt_says_where_and_what(prompt, says):
    with pytest.raises(DataError) as caught:
        as_messages(prompt, "x.jsonl, row 3")
    assert str(caught.value).startswith("x.jsonl, row 3: ")
    assert says in str(caught.value)


def test_a_template_that_refuses_names_row_and_roles():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match=r"row 2: .*\['user'\].*System role not supported"):
        render([USER], tokenizer, "row 2")


@pytest.mark.parametrize("workers", [1, 2, 3, 50])
def test_token_lengths_do_not_depend_on_workers(workers):
    texts = ["x" * n for n in (5, 0, 3, 9, 1, 1, 7)]
    assert token_lengths(texts, tiny_tokenizer(), workers) == [5, 0, 3, 9, 1, 1, 7]
    assert token_lengths([], tiny_tokenizer(), workers) == []


def test_encode_adds_nothing():
    # ids: <user> 2, "q" 30, "1" 5, <assistant> 3 (4 special tokens, then string.printable from "0")
    assert encode("<user>q1<assistant>", tiny_tokenizer()) == [2, 30, 5, 3]


def test_truncation_by_hand():
    ids = [1, 2, 3, 4, 5]
    assert truncate(ids, 3, "left", "p", "k") == [3, 4, 5]
    assert truncate(ids, 3, "right", "p", "k") == [1, 2, 3]
    assert truncate(ids, 3, "middle", "p", "k") == [1, 4, 5]  # 3 // 2 = 1 from the head, 2 from the tail
    assert truncate(ids, 4, "middle", "p", "k") == [1, 2, 4, 5]
    assert truncate(ids, 5, "error", "p", "k") == ids
    with pytest.raises(DataError, match=r"p has 5 tokens, more than max_prompt_length=4.*filter_overlong_prompts"):
        truncate(ids, 4, "error", "p", "max_prompt_length")


@given(st.lists(st.integers(), max_size=30), st.integers(1, 30), st.sampled_from(["left", "right", "middle"]))
def test_truncation_keeps_order_and_length(ids, limit, mode):
    numbered = list(enumerate(ids))
    cut = truncate(numbered, limit, mode, "p", "k")
    assert len(cut) == min(len(ids), limit)
    assert cut == sorted(cut, key=lambda pair: pair[0])
    assert set(cut) <= set(numbered)
