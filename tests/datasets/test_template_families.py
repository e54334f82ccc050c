"""Token by token: what each family's template makes of a conversation, and which tokens of it are trained on.

The expected tokens are put together here by hand, piece by piece, with the mask of each piece; the data
set must give exactly these, and they must be the template's own rendering of the whole.
"""

import json

import pytest

from tests.datasets.templates import (
    GEMMA,
    LLAMA,
    MISTRAL,
    QWEN,
    QWEN_DEFAULT,
    QWEN_REASONING,
    QWEN_THINKING,
    tokenizer_with,
)
from verl.datasets import MultiTurnSFTDataset
from verl.errors import DataError
from verl.trainer.config import SFTDataConfig

U1, A1, U2, A2 = "What is 2 + 2?", "It is 4.", "And twice that?", "Eight (8) é."
TALK = [
    {"role": "user", "content": U1},
    {"role": "assistant", "content": A1},
    {"role": "user", "content": U2},
    {"role": "assistant", "content": A2},
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
    "qwen, earlier thoughts are left out": (
        QWEN_REASONING,
        [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + A1}, TALK[2], TALK[3]],
        [
            (chatml("user", U1) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A1 + "<|im_end|>", 1),
            ("\n" + chatml("user", U2) + "<|im_end|>\n" + chatml("assistant"), 0),
            (A2 + "<|im_end|>", 1),
            ("\n", 0),
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
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_gemma_refuses_a_system_message(tmp_path):
    with pytest.raises(DataError, match=r"row 0: the chat template refuses the messages \(roles \['system'"):
        open_talk(tmp_path, tokenizer_with(GEMMA), [SYSTEM, *TALK])


def test_a_prompt_of_rl_and_of_supervised_training_are_the_same(tmp_path):
    # What a rollout is given is, token by token, what comes before the first trained token.
    for family, (template, messages, _) in FAMILIES.items():
        tokenizer = tokenizer_with(template)
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        item = open_talk(tmp_path, tokenizer, messages)[0]
        prompt = tokenizer.apply_chat_template(messages[:first], tokenize=False, add_generation_prompt=True)
        start = item["loss_mask"].tolist().index(1)
        assert item["input_ids"][:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"], family
