"""What the chat template would write otherwise: found, counted by kind, and shown once."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.test_conversation import TOKENIZERS, TOOLS, call, decode, draw, encode, result, start, user
from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.rendering_check import KINDS, differences


def clean(template):
    conversation = start("chatml", template=template)
    draw(conversation, "chatml", "Yes")
    conversation.add_messages([user("On.")])
    draw(conversation, "chatml", "Done", end=False)
    return conversation


def retokenized(template):
    conversation = start("chatml", template=template)
    ids = [token for letter in "answer" for token in encode("chatml", letter)] + encode("chatml", "<|im_end|>")
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "answer"})
    return conversation


def stripped(template):
    conversation = start("chatml", template=template)
    ids = encode("chatml", "Yes. <|im_end|>")
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "Yes."})
    return conversation


def without_thoughts(template):
    conversation = start("chatml_thinking", template=template)
    draw(conversation, "chatml_thinking", "<think>\nhm\n</think>\n\nYes")
    conversation.add_messages([user("On.")])
    draw(conversation, "chatml_thinking", "<think>\nhm\n</think>\n\nDone")
    return conversation


def with_moved_tools(template):
    conversation = start("mistral", tools=TOOLS, template=template)
    ids = encode("mistral", "[INST] Yes</s>")[1:]
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "Yes"})
    conversation.add_messages([user("On.")])
    return conversation


def ended_otherwise(template):
    conversation = start("gpt_oss", template=template)
    ids = encode("gpt_oss", "<|channel|>final<|message|>Yes<|return|>")
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "Yes"})
    conversation.add_messages([user("On.")])
    return conversation


def refused(template):
    conversation = start("llama", template=template)
    draw(conversation, "llama", "-", [call(number=0), call(number=1)])
    conversation.add_messages([result("A", 0), result("B", 1)])
    return conversation


CASES = {
    "tokens": (retokenized, "chatml", "'<|im_start|>assistant\\nanswer'"),
    "whitespace": (stripped, "chatml", "assistant\\nYes. '"),
    "history": (without_thoughts, "chatml_thinking", "<think>\\nhm\\n</think>\\n\\nYes"),
    "context": (with_moved_tools, "mistral", "[AVAILABLE_TOOLS]"),
    "turn_end": (ended_otherwise, "gpt_oss", "'<|return|>'"),
    "refused": (refused, "llama", "one call at a time"),
}


def test_every_kind_has_a_case():
    assert CASES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_is_counted_every_time_and_shown_once(kind, caplog):
    make, family, excerpt = CASES[kind]
    template = ChatTemplate(TOKENIZERS[family])
    with caplog.at_level(logging.WARNING):
        first, second = make(template), make(template)
        assert set(first.check()) == set(second.check()) == set(second.problems) == {kind}
    [shown] = caplog.messages
    assert f"({kind})" in shown
    assert excerpt in shown


def test_modes_choose_what_is_compared():
    def found(mode, make, family):
        return dict(make(ChatTemplate(TOKENIZERS[family], sanity_check=mode)).check())

    assert found("strict", stripped, "chatml") == {"whitespace": 1}
    assert found("ignore_strippable", stripped, "chatml") == {}
    assert found("ignore_strippable", without_thoughts, "chatml_thinking") == {"history": 1}
    assert found("disable", without_thoughts, "chatml_thinking") == {}
    assert found("strict", clean, "chatml") == {}  # the end that a last turn lacks comes too late for the policy


SEQUENCES = st.lists(st.integers(0, 3), max_size=12)


def compared(written, mask, rendering, ends=()):
    """Kinds and texts; 0 begins a part, and a token's text is its digit."""
    found = differences(
        written,
        mask,
        rendering,
        special=frozenset({0}),
        ends=frozenset(ends),
        decode=lambda ids: "".join(map(str, ids)),
    )
    return [(one.kind, one.written, one.rendered) for one in found]


@settings(deadline=None)
@given(SEQUENCES, SEQUENCES)
def test_nothing_is_found_only_in_equal_sequences(written, rendering):
    assert (not compared(written, [0] * len(written), rendering, ends={3})) == (written == rendering)


def test_parts_are_compared_one_by_one():
    assert compared([0, 1, 0, 2, 0, 3], [0, 0, 0, 1, 0, 0], [0, 4, 0, 5, 0, 3]) == [
        ("context", "01", "04"),
        ("history", "02", "05"),
    ]
    assert compared([0, 1, 2], [0, 0, 1], [0, 5, 2]) == [("context", "012", "052")]  # the drawn 2 is the same
    assert compared([0, 1, 2], [0, 0, 1], [0, 1, 5, 2]) == [("history", "012", "0152")]  # put into the turn
    assert compared([0, 1, 0, 2], [1, 1, 0, 0], [0, 1, 0, 3, 0, 2]) == [("context", "", "03")]


# ---- templates that rewrite history -------------------------------------------------------------


def test_inference_template_begins_another_sequence_where_history_is_rewritten():
    template = ChatTemplate(TOKENIZERS["chatml_thinking"], use_inference_chat_template=True)
    conversation = start("chatml_thinking", template=template, tools=TOOLS)
    thought = "<think>\nhm\n</think>\n\nlook"
    made = '\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call><|im_end|>'
    first = encode("chatml_thinking", thought + made)
    conversation.add_drawn(first, [-1.0] * len(first), {"content": thought, "tool_calls": [call()]})
    conversation.add_messages([result("4")])  # thoughts since the last question stay
    second = draw(conversation, "chatml_thinking", "<think>\nso\n</think>\n\nYes")
    assert len(conversation.sequences) == 1
    conversation.add_messages([user("On.")])
    third = draw(conversation, "chatml_thinking", "Done")
    before, after = conversation.sequences
    assert [
        token for token, one in zip(before.response_ids, before.response_mask, strict=True) if one
    ] == first + second
    assert [token for token, one in zip(after.response_ids, after.response_mask, strict=True) if one] == third
    assert before.prompt_ids == after.prompt_ids == conversation.prompt_ids
    assert [turn.role for turn in before.turns] == ["assistant", "tool", "assistant"]
    assert [turn.role for turn in after.turns] == ["history", "assistant"]
    seen = decode("chatml_thinking", after.response_ids)
    assert "hm" not in seen
    assert "so" not in seen
    assert seen.endswith("On.<|im_end|>\n<|im_start|>assistant\nDone<|im_end|>")
    assert conversation.ids == after.prompt_ids + after.response_ids


def test_inference_template_keeps_drawn_tokens_whose_text_the_template_keeps():
    template = ChatTemplate(TOKENIZERS["chatml"], use_inference_chat_template=True)
    conversation = start("chatml", template=template)
    ids = [token for letter in "answer" for token in encode("chatml", letter)] + encode("chatml", "<|im_end|>")
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "answer"})
    conversation.add_messages([user("On.")])
    assert len(conversation.sequences) == 1
    assert conversation.response_ids[: len(ids)] == ids


def test_a_template_that_writes_no_tools_is_told_once(caplog):
    template, prompt = ChatTemplate(TOKENIZERS["gemma"]), [{"role": "user", "content": "Hi"}]
    for tools in (None, TOOLS, TOOLS):
        Conversation(template, prompt, tools)
    Conversation(ChatTemplate(TOKENIZERS["chatml"]), prompt, TOOLS)
    [told] = caplog.messages
    assert "does not write tools: the model sees none of search, unless the prompts describe them" in told
