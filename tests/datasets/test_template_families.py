"""Token by token: what each family's template makes of a conversation, and which tokens of it are trained on.

The expected tokens are put together here by hand, piece by piece, with the mask of each piece; the data
set must give exactly these, and they must be the template's own rendering of the whole.
"""

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.datasets.templates import (
    GEMMA,
    GLM45,
    LLAMA,
    MISTRAL,
    QWEN,
    QWEN3,
    QWEN_DEFAULT,
    QWEN_REASONING,
    QWEN_THINKING,
    tokenizer_with,
)
from tests.support.chat_templates import chat_tokenizer
from verl.config import DataConfig, PreferenceDataConfig, SFTDataConfig
from verl.datasets import MultiTurnSFTDataset, RLHFDataset, RMDataset
from verl.errors import ConfigError, DataError

U1, A1, U2, A2 = "What is 2 + 2?", "It is 4.", "And twice that?", "Eight (8) é."
TALK = [
    {"role": "user", "content": U1},
    {"role": "assistant", "content": A1},
    {"role": "user", "content": U2},
    {"role": "assistant", "content": A2},
]
CALLING = [
    {"role": "user", "content": U1},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": A1, "reasoning_content": "so"},
]
THINKING = [
    {"role": "user", "content": U1},
    {"role": "assistant", "content": A1, "reasoning_content": "hm"},
    {"role": "user", "content": U2},
    {"role": "assistant", "content": A2, "reasoning_content": "so"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def chatml(role, content=""):
    return f"<|im_start|>{role}\n{content}"


def header(role):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


# (text, 1 if it is trained on), in order
FAMILIES = {
    "qwen": (
        QWEN,
        TALK,
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 1),
            ("\n" + chatml("user", U2) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A2 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen with its own system prompt": (
        QWEN_DEFAULT,
        TALK[:2],
        [
            (chatml("system", "You are helpful.<|im_end|>\n"), 0),
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen with a system message": (
        QWEN_DEFAULT,
        [SYSTEM, *TALK[:2]],
        [
            (chatml("system", "Be brief.<|im_end|>\n"), 0),
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen, an empty thought in the last answer": (
        QWEN_THINKING,
        TALK,
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 1),
            ("\n" + chatml("user", U2) + "<|im_end|>\n" + chatml("assistant"), 0),
            ("<think>\n\n</think>\n\n" + A2 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen, a thought of the last answer is learned": (
        QWEN_REASONING,
        [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + A1}],
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            ("<think>\nhm\n</think>\n\n" + A1 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen, earlier thoughts are left out of the context": (
        QWEN_REASONING,
        [
            TALK[0],
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + A1, "trainable": False},
            TALK[2],
            TALK[3],
        ],
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 0),
            ("\n" + chatml("user", U2) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A2 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "qwen 3, thoughts before and after a call": (
        QWEN3,
        CALLING,
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            ('<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call><|im_end|>', 1),
            ("\n" + chatml("user", "4") + "<|im_end|>\n" + chatml("assistant"), 0),
            ("<think>\nso\n</think>\n\n" + A1 + "<|im_end|>", 1),
            ("\n", 0),
        ],
    ),
    "glm 4.5, turns end with the next message's token": (
        GLM45,
        TALK,
        [
            (f"[gMASK]<sop><|user|>\n{U1}<|assistant|>", 0),
            (f"\n<think></think>\n{A1}<|user|>", 1),
            (f"\n{U2}<|assistant|>", 0),
            (f"\n<think></think>\n{A2}<|user|>", 1),
        ],
    ),
    "glm 4.5, calls end with the token of results": (
        GLM45,
        CALLING,
        [
            (f"[gMASK]<sop><|user|>\n{U1}<|assistant|>", 0),
            ("\n<think>hm</think>\n<tool_call>f\na: 2\n</tool_call><|observation|>", 1),
            ("\n4<|assistant|>", 0),
            (f"\n<think>so</think>\n{A1}<|user|>", 1),
        ],
    ),
    "glm 4.5, a call at the end": (
        GLM45,
        CALLING[:2],
        [
            (f"[gMASK]<sop><|user|>\n{U1}<|assistant|>", 0),
            ("\n<think>hm</think>\n<tool_call>f\na: 2\n</tool_call><|observation|>", 1),
        ],
    ),
    "llama": (
        LLAMA,
        [SYSTEM, *TALK],
        [
            ("<|begin_of_text|>" + header("system") + "Be brief.<|eot_id|>", 0),
            (header("user") + U1 + "<|eot_id|>" + header("assistant"), 0),
            (A1 + "<|eot_id|>", 1),
            (header("user") + U2 + "<|eot_id|>" + header("assistant"), 0),
            (A2 + "<|eot_id|>", 1),
        ],
    ),
    "gemma": (
        GEMMA,
        TALK,
        [
            (f"<bos><start_of_turn>user\n{U1}<end_of_turn>\n<start_of_turn>model\n", 0),
            (A1 + "<end_of_turn>", 1),
            (f"\n<start_of_turn>user\n{U2}<end_of_turn>\n<start_of_turn>model\n", 0),
            (A2 + "<end_of_turn>", 1),
            ("\n", 0),
        ],
    ),
    "mistral": (
        MISTRAL,
        TALK,
        [
            (f"<s>[INST] {U1} [/INST]", 0),
            (f" {A1}</s>", 1),  # the template has no generation prompt, so the space is the model's to write
            (f"[INST] {U2} [/INST]", 0),
            (f" {A2}</s>", 1),
        ],
    ),
}


def open_talk(tmp_path, tokenizer, messages, **changes):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return MultiTurnSFTDataset(str(path), tokenizer, SFTDataConfig(**{"max_length": 1000, **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_assistants_tokens_are_trained_on(tmp_path, family):
    template, messages, pieces = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    item = open_talk(tmp_path, tokenizer, messages)[0]
    ids, mask = [], []
    for text, learn in pieces:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        mask += [learn] * len(tokens)
    assert item["input_ids"].tolist() == ids
    assert item["loss_mask"].tolist() == mask
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if template == GLM45:
        whole += "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert len(open_talk(tmp_path, tokenizer, messages, max_length=len(ids), truncation="error")) == 1


def test_gemma_refuses_a_system_message(tmp_path):
    with pytest.raises(DataError, match=r"row 0: the chat template refuses the messages \(roles \['system'"):
        open_talk(tmp_path, tokenizer_with(GEMMA), [SYSTEM, *TALK])


def test_a_prompt_of_rl_and_of_supervised_training_are_the_same(tmp_path):
    # What a rollout is given is, token by token, what comes before the first trained token.
    for family, (template, messages, _) in FAMILIES.items():
        tokenizer = tokenizer_with(template)
        trained = [message["role"] == "assistant" and message.get("trainable", True) for message in messages]
        first = trained.index(True)
        item = open_talk(tmp_path, tokenizer, messages)[0]
        prompt = tokenizer.apply_chat_template(messages[:first], tokenize=False, add_generation_prompt=True)
        start = item["loss_mask"].tolist().index(1)
        assert item["input_ids"][:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"], family


# ---- texts that the template leaves out ---------------------------------------------------------------------


def learned(dataset):
    items = [dataset[item] for item in range(len(dataset))]
    return [dataset.tokenizer.decode(item["input_ids"][item["loss_mask"].bool()]) for item in items]


QWEN3_TURNS = [f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>" for thought, text in (("hm", A1), ("so", A2))]


def test_thoughts_of_earlier_turns_do_not_vanish_unnoticed(tmp_path, caplog):
    tokenizer, path = tokenizer_with(QWEN3), tmp_path / "train.jsonl"
    rows = [{"messages": THINKING}, {"messages": THINKING[:2]}, {"messages": TALK}, {"messages": THINKING}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        MultiTurnSFTDataset(str(path), tokenizer, {"max_length": 1000})
    for part in (
        "2 of 4 conversations have",
        "row 0 (message 1: reasoning_content 'hm')",
        "row 3 (",
        "trainable: false",
    ):
        assert part in str(caught.value)
    settings = {"max_length": 1000, "ignore_input_ids_mismatch": True}
    assert learned(MultiTurnSFTDataset(str(path), tokenizer, settings))[0] == f"{A1}<|im_end|>{QWEN3_TURNS[1]}"
    assert "2 of 4 conversations have a turn to train on of which" in caplog.text


def test_the_lines_of_the_page_write_a_row_for_each_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": THINKING}) + "\n")
    page = (Path(__file__).parents[2] / "docs" / "supervised.md").read_text()
    exec(textwrap.dedent(re.search(r" *```python\n(.*?)```", page, re.DOTALL)[1]), {})
    turns = MultiTurnSFTDataset(str(tmp_path / "turns.jsonl"), tokenizer_with(QWEN3), {"max_length": 1000})
    assert learned(turns) == QWEN3_TURNS


@pytest.mark.parametrize(
    "template, fields, says",
    [
        (
            QWEN,
            {"reasoning_content": "hm"},
            "message 1: reasoning_content 'hm' (it writes no reasoning_content: put it",
        ),
        (QWEN3, {"thoughts": "hm"}, "message 1: thoughts 'hm' (it writes no thoughts"),
        (QWEN3, {"reasoning_details": [{"type": "text", "text": "hm"}]}, "message 1: reasoning_details 'text' (it"),
        (QWEN3, {"refusal": "No."}, "message 1: refusal 'No.' (it"),
        (QWEN3, {"name": "bot", "id": "a", "thinking": None, "reasoning": " "}, None),
        (QWEN3, {"country": "Chad"}, None),
    ],
)
def test_fields_that_the_template_does_not_write(tmp_path, caplog, template, fields, says):
    messages = [TALK[0], TALK[1] | fields]
    if says is None:
        open_talk(tmp_path, tokenizer_with(template), messages)
        assert ("in a field that the chat template does not write: " in caplog.text) == ("country" in fields)
        return
    with pytest.raises(DataError) as caught:
        open_talk(tmp_path, tokenizer_with(template), messages)
    assert says in str(caught.value)


def test_a_text_beside_a_call_that_the_template_leaves_out(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [TALK[0], {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]
    with pytest.raises(DataError, match=r"message 1: content 'Let me see.'\)"):
        open_talk(tmp_path, chat_tokenizer("llama"), messages)


def test_prompts_warn_of_fields_that_the_template_does_not_write(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": THINKING[:3]}) + "\n")
    RLHFDataset(str(path), tokenizer_with(QWEN), DataConfig())
    assert "1 of 1 prompts have a message with text in a field" in caplog.text
    assert "row 0 (reasoning_content)" in caplog.text


def test_pairs_do_not_lose_thoughts_either(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": THINKING[:1], "chosen": THINKING[1:], "rejected": "No."}) + "\n")
    with pytest.raises(DataError, match=r"1 of 1 pairs have .*row 0 \(message 1: reasoning_content 'hm'\)"):
        RMDataset(str(path), tokenizer_with(QWEN3), PreferenceDataConfig(max_length=1000))
    sides = RMDataset(
        str(path), tokenizer_with(GLM45), PreferenceDataConfig(max_length=1000, ignore_input_ids_mismatch=True)
    ).sequences(0)
    assert [tokenizer_with(GLM45).decode(ids[-1:]) for ids, mask in sides if mask[-1]] == ["<|user|>"] * 2


# ---- accepted all the same ----------------------------------------------------------------------------------


def test_glm_with_earlier_thoughts_is_accepted_if_asked_for(tmp_path):
    [text] = learned(open_talk(tmp_path, tokenizer_with(GLM45), THINKING, ignore_input_ids_mismatch=True))
    assert text == f"\n<think></think>\n{A1}<|user|>\n<think>so</think>\n{A2}<|user|>"


# What is learned of THINKING with thoughts in the text, or of TALK; families of which no turn is rewritten are strict.
ACCEPTED = {
    "chatml_thinking": [f"{A1}<|im_end|>", f"<think>\nso\n</think>\n\n{A2}<|im_end|>"],
    "chatml_thinks_first": [f"{A1}<|im_end|>", f"so\n</think>\n\n{A2}<|im_end|>"],
    "deepseek": [f"{A1}<|eos|>", f"{A2}<|eos|>"],
    "deepseek_thinking": [f"{A1}<|eos|>", f"{A2}<|eos|>"],
    "glm": [f"{A1}<|user|>", f"<think>so</think>{A2}<|user|>"],
}


@pytest.mark.parametrize("family", ACCEPTED)
def test_every_family_accepts_turns_that_it_rewrites(tmp_path, family):
    messages = [dict(message) for message in THINKING]
    for message in messages[1::2]:
        message["content"] = f"<think>{message.pop('reasoning_content')}</think>{message['content']}"
    tokenizer = chat_tokenizer(family)
    with pytest.raises(DataError, match="ignore_input_ids_mismatch"):
        open_talk(tmp_path, tokenizer, messages)[0]
    assert learned(open_talk(tmp_path, tokenizer, messages, ignore_input_ids_mismatch=True)) == [
        "".join(ACCEPTED[family])
    ]


def test_a_template_without_headers_whose_prompts_change(tmp_path):
    # Mistral's tools stand before the last question alone, so the prompt of the first turn has them and the whole not.
    tools = [{"type": "function", "function": {"name": "f", "description": "-", "parameters": {}}}]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": TALK, "tools": tools}) + "\n")
    tokenizer = chat_tokenizer("mistral")
    with pytest.raises(DataError, match="renders the prompt of this turn differently"):
        MultiTurnSFTDataset(str(path), tokenizer, {"max_length": 1000})[0]
    settings = {"max_length": 1000, "ignore_input_ids_mismatch": True}
    assert learned(MultiTurnSFTDataset(str(path), tokenizer, settings)) == [f"{A1}</s> {A2}</s>"]


def test_turns_without_an_end_are_refused(tmp_path):
    tokenizer = tokenizer_with(QWEN)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(
        ConfigError,
        match="no token of this tokenizer at the end of the assistant's turn, so the model would never",
    ):
        open_talk(tmp_path, tokenizer, TALK)
