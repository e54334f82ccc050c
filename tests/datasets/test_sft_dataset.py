"""Supervised data sets: rows of ids and masks, padding, cuts, and what is refused."""

import json
import random

import pytest
import torch
from omegaconf import OmegaConf

from tests.datasets.templates import QWEN, QWEN_THINKING, tokenizer_with
from verl.datasets import (
    MultiTurnSFTDataset,
    SFTDataset,
    create_rl_sampler,
    create_sft_dataset,
    sft_collate_fn,
)
from verl.errors import ConfigError, DataError
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import SFTDataConfig
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator

TOKENIZER = tiny_tokenizer()  # <user>…<assistant>…<eos>; ids: pad 0, eos 1, user 2, assistant 3, "0" 4, "a" 14


def config(**changes):
    return SFTDataConfig(**{"max_length": 8, **changes})


def talk(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def open_talk(tmp_path, *conversations, **changes):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": talk(*contents)} for contents in conversations])
    return MultiTurnSFTDataset(path, TOKENIZER, config(**changes))


def lists(item):
    return {key: value.tolist() for key, value in item.items()}


def test_a_conversation_by_hand(tmp_path):
    assert lists(open_talk(tmp_path, ("a", "01"))[0]) == {
        "input_ids": [2, 14, 3, 4, 5, 1],
        "attention_mask": [1, 1, 1, 1, 1, 1],
        "position_ids": [0, 1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 0, 1, 1, 1],
    }


def test_right_padding_to_max_length(tmp_path):
    assert lists(open_talk(tmp_path, ("a", "01"), pad_mode="right")[0]) == {
        "input_ids": [2, 14, 3, 4, 5, 1, 0, 0],
        "attention_mask": [1, 1, 1, 1, 1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 5, 5, 5],
        "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0],
    }


@pytest.mark.parametrize(
    "truncation, ids, mask",
    [
        ("left", [3, 4, 5, 1], [0, 1, 1, 1]),
        ("right", [2, 14, 3, 4], [0, 0, 0, 1]),
        ("middle", [2, 14, 5, 1], [0, 0, 1, 1]),
    ],
)
def test_ids_and_mask_are_cut_at_the_same_places(tmp_path, truncation, ids, mask):
    item = open_talk(tmp_path, ("a", "01"), max_length=4, truncation=truncation)[0]
    assert item["input_ids"].tolist() == ids
    assert item["loss_mask"].tolist() == mask


def test_collate_pads_to_the_longest(tmp_path):
    dataset = open_talk(tmp_path, ("a", "01"), ("a", "0"))
    batch = sft_collate_fn(TOKENIZER, config())([dataset[0], dataset[1]])
    assert lists(batch) == {
        "input_ids": [[2, 14, 3, 4, 5, 1], [2, 14, 3, 4, 1, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]],
        "loss_mask": [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_the_collator_of_public_scripts(tmp_path):
    dataset = open_talk(tmp_path, ("a", "01"), ("a", "0"))
    batch = SFTTensorCollator(DatasetPadMode.NO_PADDING)([dataset[0] | {"why": "x"}, dataset[1] | {"why": "y"}])
    assert [row.tolist() for row in batch["input_ids"].unbind()] == [[2, 14, 3, 4, 5, 1], [2, 14, 3, 4, 1]]
    assert [row.tolist() for row in batch["loss_mask"].unbind()] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert batch["why"] == ["x", "y"]
    dataset = open_talk(tmp_path, ("a", "01"), ("a", "0"), pad_mode="right")
    batch = SFTTensorCollator("right")([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[2, 14, 3, 4, 5, 1, 0, 0], [2, 14, 3, 4, 1, 0, 0, 0]]
    with pytest.raises(ConfigError, match=r"pad_mode=.left. is unknown\. Known: right, left_right, no_padding"):
        SFTTensorCollator("left")


def test_collate_keeps_fixed_lengths(tmp_path):
    dataset = open_talk(tmp_path, ("a", "01"), ("a", "0"), pad_mode="right")
    assert sft_collate_fn(TOKENIZER, config(pad_mode="right"))([dataset[0], dataset[1]])["input_ids"].shape == (2, 8)


def test_prompt_and_response_are_a_conversation_of_one_turn(tmp_path):
    path = jsonl(
        tmp_path / "x.jsonl",
        [{"q": "a", "r": "01"}, {"q": [{"role": "user", "content": "a"}], "r": "01"}],
    )
    dataset = create_sft_dataset(path, config(prompt_key="q", response_key="r"), TOKENIZER)
    assert isinstance(dataset, SFTDataset)
    for row in range(2):
        assert dataset[row]["input_ids"].tolist() == [2, 14, 3, 4, 5, 1]
        assert dataset[row]["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1]


def test_probable_mistakes_are_warnings(tmp_path, caplog):
    open_talk(tmp_path, ("a", ""), ("", "0"), ("a<eos>", "0"))
    answer, question, special = sorted(record.getMessage() for record in caplog.records)
    assert answer.startswith("1 of 3 conversations have a message of the assistant without text, which trains")
    assert special.startswith("1 of 3 conversations have the text of a special token")
    assert question.startswith("1 of 3 conversations have a message of the user without text")


def test_a_section_of_public_code(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": talk("a", "01")}])
    dataset = MultiTurnSFTDataset(parquet_files=path, tokenizer=TOKENIZER, config=OmegaConf.create({"max_length": 9}))
    assert dataset[0]["input_ids"].tolist() == [2, 14, 3, 4, 5, 1]


def test_dict_keys_lead_into_a_column(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"extra_info": {"question": "a", "deep": {"answer": "01"}}}])
    keys = {"prompt_key": "extra_info", "response_key": "extra_info", "prompt_dict_keys": ["question"]}
    dataset = create_sft_dataset(path, config(**keys, response_dict_keys=["deep", "answer"]), TOKENIZER)
    assert dataset[0]["input_ids"].tolist() == [2, 14, 3, 4, 5, 1]
    with pytest.raises(DataError, match=r"row 0: response_dict_keys asks for 'nothing'"):
        create_sft_dataset(path, config(**keys, response_dict_keys=["nothing"]), TOKENIZER)
    with pytest.raises(DataError, match="the response is dict"):
        create_sft_dataset(path, config(**keys, response_dict_keys=["deep"]), TOKENIZER)


def test_tools_and_thinking_columns(tmp_path):
    tokenizer = tokenizer_with(QWEN_THINKING)
    tools = [{"name": "add"}]
    path = jsonl(
        tmp_path / "x.jsonl",
        [
            {"messages": talk("a", "b"), "tools": tools, "enable_thinking": False},
            {"messages": talk("a", "b"), "tools": json.dumps(tools), "enable_thinking": True},
            {"messages": talk("a", "b"), "tools": None, "enable_thinking": None},
        ],
    )
    dataset = create_sft_dataset(path, config(max_length=200), tokenizer)
    texts = [tokenizer.decode(dataset[i]["input_ids"]) for i in range(3)]
    learned = [
        tokenizer.decode(item["input_ids"][item["loss_mask"].bool()]) for item in map(dataset.__getitem__, range(3))
    ]
    assert ["add" in text for text in texts] == [True, True, False]
    assert learned == ["b<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]


def test_ignore_input_ids_mismatch(tmp_path):
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_tokens(["\n\n"])
    path = jsonl(tmp_path / "x.jsonl", [{"messages": talk("a", "\nb")}])
    with pytest.raises(DataError, match="ignore_input_ids_mismatch"):
        create_sft_dataset(path, config(max_length=200), tokenizer)[0]
    create_sft_dataset(path, config(max_length=200, ignore_input_ids_mismatch=True), tokenizer)[0]


@pytest.mark.parametrize(
    "record, says",
    [
        ({"chat": []}, "no column 'messages' (messages_key). Its columns: chat."),
        ({"messages": talk("a")}, "row 0: no message has the role 'assistant'"),
        ({"messages": "a"}, "row 0: no message has the role 'assistant'"),
        ({"messages": talk("a", "b")[::-1]}, "row 0: the conversation begins with the assistant"),
        ({"messages": json.dumps(talk("a", "b"))}, "row 0: messages are JSON text"),
        ({"messages": [{"role": "user"}]}, "row 0: message 0 has content NoneType"),
        ({"messages": talk("a", "b"), "tools": "{"}, "row 0: the tools are not valid JSON"),
        ({"messages": talk("a", "b"), "tools": "{}"}, "row 0: the tools are dict, not a list"),
    ],
)
def test_a_row_that_cannot_be_used(tmp_path, record, says):
    with pytest.raises(DataError) as caught:
        create_sft_dataset(jsonl(tmp_path / "x.jsonl", [record]), config(), TOKENIZER)[0]
    assert says in str(caught.value)


def test_a_long_conversation_is_an_error_at_opening(tmp_path):
    with pytest.raises(DataError) as caught:
        open_talk(tmp_path, ("a", "01"), ("a", "012345"), ("a", "0123456"))
    for part in ("2 of 3", "max_length=8", "row 1 with 10 tokens", "longest has 11"):
        assert part in str(caught.value)


def test_only_one_of_the_two_keys(tmp_path):
    with pytest.raises(ConfigError, match=r"prompt_key=q and response_key=None"):
        create_sft_dataset("x", config(prompt_key="q"), TOKENIZER)


def test_sampler_of_a_supervised_run(tmp_path):
    dataset = open_talk(tmp_path, *[("a", "0")] * 10)
    assert list(create_rl_sampler(config(shuffle=False), dataset)) == list(range(10))
    order = list(create_rl_sampler(config(seed=4), dataset))
    assert sorted(order) == list(range(10))
    assert order == list(create_rl_sampler(config(seed=4), dataset))


def test_max_samples(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": talk("a", str(i))} for i in range(9)])
    kept = create_sft_dataset(path, config(shuffle=False), TOKENIZER, max_samples=2)
    assert [kept[i]["input_ids"].tolist() for i in range(len(kept))] == [[2, 14, 3, 4, 1], [2, 14, 3, 5, 1]]


def test_random_batches_keep_every_token(tmp_path):
    rng = random.Random(0)
    talks = [("a", "0123456789"[: rng.randint(1, 4)]) for _ in range(20)]
    dataset = open_talk(tmp_path, *talks)
    batch = sft_collate_fn(TOKENIZER, config())([dataset[i] for i in range(20)])
    for row, (_, answer) in enumerate(talks):
        length = len(answer) + 4
        assert batch["attention_mask"][row].sum() == length
        assert TOKENIZER.decode(batch["input_ids"][row][batch["loss_mask"][row].bool()]) == f"{answer}<eos>"


def test_rows_with_images_are_refused_and_empty_columns_are_fine(tmp_path):
    rows = [{"messages": talk("a", "01"), "images": []}, {"messages": talk("<image>", "01"), "images": ["a.png"]}]
    assert len(MultiTurnSFTDataset(jsonl(tmp_path / "empty.jsonl", rows[:1]), TOKENIZER, config())) == 1
    with pytest.raises(
        DataError, match=r"x.jsonl, row 1: column 'images' holds 1 item\(s\).*the model is one for text"
    ):
        MultiTurnSFTDataset(jsonl(tmp_path / "x.jsonl", rows), TOKENIZER, config())
