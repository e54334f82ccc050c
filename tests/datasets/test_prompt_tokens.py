"""Prompts have the same tokens wherever they are made: in the data set, in a loop of one's own, in a conversation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_templates import FAMILIES, chat_tokenizer
from verl.agents.chat_template import ChatTemplate
from verl.agents.loop import AgentLoopBase
from verl.datasets.chat import encode, render_prompt, token_lengths
from verl.datasets.rl_dataset import RLHFDataset
from verl.errors import DataError
from verl.testing.models import tiny_tokenizer

TOKENIZERS = {family: chat_tokenizer(family) for family in ("llama", "mistral", "chatml", "gpt_oss", "deepseek")}
TEMPLATES = {family: ChatTemplate(tokenizer) for family, tokenizer in TOKENIZERS.items()}


def of_a_loop(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    class Loop(AgentLoopBase):
        def __init__(self) -> None:
            self.tokenizer, self.processor, self.apply_chat_template_kwargs = tokenizer, None, {}

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return await self.apply_chat_template(messages)

    return asyncio.run(Loop().run({}))


@pytest.mark.parametrize("family", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_three_ways_make_the_same_tokens_and_no_text_is_a_control_token(family: str, data: Any):
    tokenizer, template = TOKENIZERS[family], TEMPLATES[family]
    pieces = [*FAMILIES[family].special, *FAMILIES[family].structural, "word", " ", "é😀", "\ufdd0", "<"]
    said = [data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=6).map("".join)) for _ in range(3)]
    messages = [
        {"role": role, "content": text.strip() or "-"}
        for role, text in zip(("user", "assistant", "user"), said, strict=True)
    ]
    if any(token in messages[1]["content"] for token in FAMILIES[family].special):
        messages[1]["content"] = "an answer"  # what the policy said may hold them
    expected = template.prompt(messages)
    text = render_prompt(messages, tokenizer, "here")
    assert encode(text, tokenizer) == expected
    assert token_lengths([text, text], tokenizer) == [len(expected)] * 2
    assert of_a_loop(tokenizer, messages) == expected
    plain = template.prompt([{"role": m["role"], "content": "-"} for m in messages])
    special = set(template.control.special.values())
    assert [token for token in expected if token in special] == [token for token in plain if token in special]


def test_a_data_set_reads_special_tokens_of_its_texts_as_text(tmp_path: Path):
    tokenizer = tiny_tokenizer("char")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a<eos>", "fine")))
    config = {"max_prompt_length": 16, "return_full_prompt": True, "return_raw_chat": True}
    dataset = RLHFDataset(str(path), tokenizer, config)
    # <user> 2, then the letters a < e o s > one by one, and not <eos>; <assistant> 3.
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "a<eos>"]
    ids = dataset[0]["input_ids"].tolist()
    assert ids == [tokenizer.pad_token_id] * 8 + [2, *letters, 3]
    assert tokenizer.eos_token_id not in ids[8:]
    assert dataset[0]["full_prompts"] == "<user>a<eos><assistant>"
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "a<eos>"}]
    assert [len(one[0]) for one in (dataset.sequences(0)[0], dataset.sequences(1)[0])] == [8, 6]


def test_a_slow_tokenizer_is_told_apart():
    class Slow:
        is_fast = False
        added_tokens_decoder = tiny_tokenizer("char").added_tokens_decoder

        def __len__(self) -> int:
            return 9

        def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
            return "".join(message["content"] for message in messages)

    assert render_prompt([{"role": "user", "content": "fine"}], Slow(), "row 3") == "fine"
    with pytest.raises(DataError, match=r"row 3 has the text of a special token, which this tokenizer \(Slow\) cannot"):
        render_prompt([{"role": "user", "content": "a<eos>"}], Slow(), "row 3")
