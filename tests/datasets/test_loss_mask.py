"""What is learned of a conversation: exactly what the assistant writes, under every family's template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.datasets.templates import GEMMA, LLAMA, QWEN, QWEN_THINKING, tokenizer_with
from tests.support.chat_templates import chat_tokenizer
from verl.datasets.loss_mask import mask_assistant
from verl.errors import DataError

TOKENIZERS = {template: tokenizer_with(template) for template in (QWEN, QWEN_THINKING, LLAMA, GEMMA)}
END = {QWEN: "<|im_end|>", QWEN_THINKING: "<|im_end|>", LLAMA: "<|eot_id|>", GEMMA: "<end_of_turn>"}


def talk(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def learned_pieces(ids, mask, tokenizer):
    """The text of each run of learned tokens."""
    runs, current = [], []
    for token, learn in zip(ids, mask, strict=True):
        if learn:
            current.append(token)
        elif current:
            runs.append(current)
            current = []
    return [tokenizer.decode(run) for run in [*runs, *([current] if current else [])]]


def mask(messages, template, **kwargs):
    return mask_assistant(messages, TOKENIZERS[template], "here", **kwargs)


@pytest.mark.parametrize(
    "template, expected",
    [
        (QWEN, ["Fine.<|im_end|>", "4<|im_end|>"]),
        (LLAMA, ["Fine.<|eot_id|>", "4<|eot_id|>"]),
        (GEMMA, ["Fine.<end_of_turn>", "4<end_of_turn>"]),
        (QWEN_THINKING, ["Fine.<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
    ],
)
def test_two_turns(template, expected):
    messages = talk("How are you?", "Fine.", "2 + 2?", "4")
    ids, learn = mask(messages, template)
    assert learned_pieces(ids, learn, TOKENIZERS[template]) == expected
    whole = TOKENIZERS[template].apply_chat_template(messages, tokenize=False)
    assert TOKENIZERS[template].decode(ids) == whole


@pytest.mark.parametrize(
    "family, expected",
    [
        ("phi", ["Fine.<|end|>", "4<|end|>\n<|endoftext|>"]),
        ("gpt_oss", ["<|channel|>final<|message|>Fine.<|end|>", "<|channel|>final<|message|>4<|return|>"]),
    ],
)
def test_the_end_of_the_conversation_has_a_token_of_its_own(family, expected):
    tokenizer = chat_tokenizer(family)
    ids, learn = mask_assistant(talk("How are you?", "Fine.", "2 + 2?", "4"), tokenizer, "here")
    assert learned_pieces(ids, learn, tokenizer) == expected


def test_a_turn_token_by_token():
    tokenizer = TOKENIZERS[QWEN]
    ids, learn = mask(talk("a", "bc"), QWEN)
    # The newline after <|im_end|> is the template's, so it is not learned.
    prompt = tokenizer("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    answer = tokenizer("bc<|im_end|>", add_special_tokens=False)["input_ids"]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert ids == prompt + answer + newline
    assert learn == [0] * len(prompt) + [1] * len(answer) + [0] * len(newline)


def test_the_prompt_of_every_turn_is_what_a_rollout_is_given():
    messages = talk("one", "two", "three", "four")
    for template, tokenizer in TOKENIZERS.items():
        ids, learn = mask(messages, template)
        starts = [i for i in range(1, len(ids)) if learn[i] and not learn[i - 1]]
        prompts = [
            tokenizer(
                tokenizer.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=True),
                add_special_tokens=False,
            )["input_ids"]
            for n in (1, 3)
        ]
        assert [ids[:start] for start in starts] == prompts, template


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<|>"), min_size=1, max_size=12).map(
    lambda text: text.strip()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT.filter(bool), min_size=2, max_size=6), st.sampled_from([QWEN, LLAMA, GEMMA]))
def test_any_conversation(contents, template):
    messages = talk(*contents)
    ids, learn = mask(messages, template)
    said = [m["content"] + END[template] for m in messages if m["role"] == "assistant"]
    assert learned_pieces(ids, learn, TOKENIZERS[template]) == said


def test_system_tool_and_repeated_assistant_messages():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6 * 7?"},
        {"role": "assistant", "content": "call mul"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
        {"role": "assistant", "content": "Bye."},
    ]
    ids, learn = mask(messages, QWEN)
    assert learned_pieces(ids, learn, TOKENIZERS[QWEN]) == [
        "call mul<|im_end|>",
        "It is 42.<|im_end|>",
        "Bye.<|im_end|>",
    ]


def test_template_variables_are_used_in_every_rendering():
    # With thinking off, the header holds an empty thought: part of the prompt, not learned.
    messages = talk("2 + 2?", "4")
    ids, learn = mask(messages, QWEN_THINKING, enable_thinking=False, tools=[{"name": "add"}])
    assert learned_pieces(ids, learn, TOKENIZERS[QWEN_THINKING]) == ["4<|im_end|>"]
    assert "Tools: [{'name': 'add'}]" in TOKENIZERS[QWEN_THINKING].decode(ids)


def test_a_prompt_that_the_whole_does_not_begin_with():
    # With thinking off, the template leaves the thought out of finished turns but puts it into their header.
    messages = talk("How are you?", "Fine.", "2 + 2?", "4")
    with pytest.raises(DataError, match=r"here: message 1.*ignore_input_ids_mismatch"):
        mask(messages, QWEN_THINKING, enable_thinking=False)
    ids, learn = mask(messages, QWEN_THINKING, enable_thinking=False, strict=False)
    assert learned_pieces(ids, learn, TOKENIZERS[QWEN_THINKING]) == ["Fine.<|im_end|>", "4<|im_end|>"]


def test_a_token_over_the_border():
    # This tokenizer knows "\n\n" as one token; an answer that begins with a newline melts into its header.
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_tokens(["\n\n"])
    messages = talk("a", "\nb")
    with pytest.raises(DataError, match=r"here: message 1.*gives other tokens.*ignore_input_ids_mismatch"):
        mask_assistant(messages, tokenizer, "here")
    ids, learn = mask_assistant(messages, tokenizer, "here", strict=False)
    assert learned_pieces(ids, learn, tokenizer) == ["b<|im_end|>"]


def test_a_template_that_refuses():
    with pytest.raises(DataError, match="Roles must alternate"):
        mask(talk("a", "b")[::-1], GEMMA)


def test_a_thought_that_only_the_generation_prompt_opens():
    # In the style of DeepSeek R1: finished turns are written without thoughts.
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|User|>", "<|Assistant|>", "<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
        "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    )
    messages = talk("a", "<think>\nx</think>b", "c", "<think>\ny</think>d")
    with pytest.raises(DataError, match="ignore_input_ids_mismatch"):
        mask_assistant(messages, tokenizer, "row 0")
    ids, learned = mask_assistant(messages, tokenizer, "row 0", strict=False)
    assert [tokenizer.decode(ids[i : i + 1]) for i, learn in enumerate(learned) if learn] == [
        "b", "<|end|>", "d", "<|end|>",
    ]  # fmt: skip
