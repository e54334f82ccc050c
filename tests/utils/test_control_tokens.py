"""Texts of messages never become control tokens, and are shortened by tokens."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.support.chat_templates import FAMILIES, chat_tokenizer
from verl.errors import ConfigError
from verl.testing.models import tiny_tokenizer
from verl.utils.control_tokens import ControlTokens

EACH_VOCABULARY = pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])
TOKENIZERS = {family: chat_tokenizer(family) for family in ("llama", "mistral", "gemma", "chatml")}
CONTROL = {name: ControlTokens(tokenizer, FAMILIES[name].template) for name, tokenizer in TOKENIZERS.items()}


@EACH_VOCABULARY
@settings(deadline=None)
@given(st.data())
def test_unmarked_texts_have_the_tokens_of_the_tokenizer(family, data):
    pieces = [*FAMILIES[family].special, " ", "  ", "\n", "word", "é😀", "<0x41>", "▁", "東"]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=4)))))
    text = text.translate(dict.fromkeys(range(0xFDD0, 0xFDD4)))
    expected = TOKENIZERS[family](text, add_special_tokens=False)["input_ids"]
    assert CONTROL[family].encode(text) == expected
    # After a control token: as in one text with it.
    end = FAMILIES[family].special[0]
    assert CONTROL[family].encode(text, after_token=True) == TOKENIZERS[family](end + text)["input_ids"][1:]


@EACH_VOCABULARY
@settings(deadline=None)
@given(st.data())
def test_marked_texts_have_no_control_token_and_keep_their_letters(family, data):
    pieces = [*FAMILIES[family].special, "<", "|>", "s>", "[", "end_of", "ab"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1)))
    control = CONTROL[family]
    ids = control.encode("-" + control.guard(text, "program"))
    assert not set(ids) & set(control.special.values())
    assert TOKENIZERS[family].decode(ids).strip() == "-" + text
    assert control.plain(control.guard(text, "program")) == text


def test_authors():
    control = CONTROL["chatml"]
    text = "<tool_call> </tool_response> <|im_end|>"

    def marked(author):
        return [token for token in text.split() if token not in control.guard(text, author)]

    assert marked("program") == ["<tool_call>", "</tool_response>", "<|im_end|>"]
    assert marked("prompt") == ["<|im_end|>"]
    assert marked("policy") == []
    nested = {"a<|im_end|>": ["<|im_end|>", 1, None, True], "b": ({"c": "<|im_end|>"},)}
    assert "<|im_end|>" not in str(control.guard(nested, "prompt"))
    assert control.guard({"a": [1, None, 0.5]}, "program") == {"a": [1, None, 0.5]}


def test_tokens_that_overlap_and_tokens_that_strip():
    tokenizer = tiny_tokenizer("bpe")
    tokenizer.add_tokens([AddedToken("<ab>", special=True), AddedToken("b><c>", special=True)])
    tokenizer.add_tokens([AddedToken("<end>", special=True, rstrip=True, lstrip=True)])
    control = ControlTokens(tokenizer, "<ab>")
    ids = control.encode(control.guard("<ab><c> <ab>b><c>", "program"))
    assert not set(ids) & set(control.special.values())
    assert tokenizer.decode(ids) == "<ab><c> <ab>b><c>"
    assert control.encode("x <end> \n y") == tokenizer("x <end> \n y")["input_ids"]


def test_one_character_is_a_letter():
    tokenizer = tiny_tokenizer("bpe")
    tokenizer.add_tokens([AddedToken("§", special=True), AddedToken("☃", special=True)])
    control = ControlTokens(tokenizer, "§☃")
    # In byte-level vocabularies § stands for the byte A7, which is half of ç.
    assert tokenizer.decode(control.encode(control.guard("a ☃ ç", "program"))) == "a ☃ ç"


def test_words_that_were_added_stay_words_and_their_counterparts_are_control():
    tokenizer = tiny_tokenizer("bpe")
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<h1>", "<think>", "</think>", "\n\n")])
    control = ControlTokens(tokenizer, "{{ text.split('</think>') }}\n\n")
    text = "<h1>\n\n<think></think>"
    ids = control.encode(control.guard(text, "program"))
    of = tokenizer.convert_tokens_to_ids
    assert ids[:2] == [of("<h1>"), of("\n\n")]
    assert not {of("<think>"), of("</think>")} & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_vocabulary_in_which_control_tokens_are_pieces():
    """The Unigram vocabulary holds <end_of_turn> as a piece of text; the copy does not."""
    tokenizer = TOKENIZERS["gemma"]
    number = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert (
        number in tokenizer._encode_without_added_tokens("<end_of_turn>")
        if hasattr(tokenizer, "_encode_without_added_tokens")
        else True
    )
    control = CONTROL["gemma"]
    assert number not in control.encode(control.guard("a <end_of_turn> b", "program"))
    assert control.encode("a <end_of_turn> b").count(number) == 1


def test_a_slow_tokenizer_is_refused():
    class Slow:
        name_or_path = "models/slow"
        is_fast = False

    with pytest.raises(ConfigError, match=r"'models/slow' \(Slow\) is not one of the 'tokenizers' library"):
        ControlTokens(Slow(), "")


# ---- shortening ---------------------------------------------------------------------------------


def test_shorten_by_hand():
    tokenizer = tiny_tokenizer("char")  # one token for each letter
    control = ControlTokens(tokenizer, "")
    text = "0123456789" * 4
    assert control.shorten(text, 40, "left") == text
    assert control.shorten(text, 24, "left") == "0123456789...(truncated)"  # a notice of 14
    assert control.shorten(text, 24, "right") == "(truncated)...0123456789"
    assert control.shorten(text, 24, "middle") == "012...(truncated)...6789"  # of 17: 7 are left, 3 and 4
    assert control.shorten(text, 14, "left") == "0123456789" + "0123"  # no room for a notice
    assert control.shorten(text, 0, "left") == ""


@EACH_VOCABULARY
@settings(deadline=None)
@given(st.data())
def test_shortened_texts_fit_and_lose_no_more_than_they_must(family, data):
    control = CONTROL[family]
    piece = st.sampled_from([*FAMILIES[family].special, " ", "\n", "word", "é", "😀", "東京", "1234"])
    text = "".join(data.draw(st.lists(piece, max_size=60)))
    limit = data.draw(st.integers(0, 60))
    keep = data.draw(st.sampled_from(["left", "middle", "right"]))
    short = control.shorten(text, limit, keep)
    assert control.count(short) <= limit
    if control.count(text) <= limit:
        assert short == text
    elif limit >= 40:
        assert control.count(short) >= limit - 8
        begin, notice, end = short.partition("(truncated)")
        assert notice
        assert text.startswith(begin.removesuffix("..."))
        assert text.endswith(end.removeprefix("..."))
        assert "\ufffd" not in short


def test_a_huge_text_is_cut_before_it_is_tokenized():
    control = CONTROL["llama"]
    text = "start " + "word \N{GRINNING FACE}" * 500_000 + " finish"
    tracemalloc.start()
    try:
        short = control.shorten(text, 50, "middle")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert short.startswith("start ")
    assert short.endswith(" finish")
    assert 40 <= control.count(short) <= 50
    assert peak < 2**23  # the positions of all tokens take more than 100 MB; other threads allocate a little
