"""Pairs for reward models and DPO: rows of two sides, what is learned of each, cuts, and what is refused."""

import json

import pytest
import torch

from tests.datasets.templates import GEMMA, LLAMA, QWEN, QWEN_THINKING, tokenizer_with
from verl.datasets import RMDataset, pair_collate_fn
from verl.errors import DataError
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import PreferenceDataConfig

TOKENIZER = tiny_tokenizer()  # <user>…<assistant>…<eos>; ids: pad 0, eos 1, user 2, assistant 3, "0" 4, "a" 14


def config(**changes):
    return PreferenceDataConfig(**{"max_length": 100, **changes})


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def open_pairs(tmp_path, *records, tokenizer=TOKENIZER, **changes):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return RMDataset(str(path), tokenizer, config(**changes))


def lists(item):
    return {key: value.tolist() for key, value in item.items()}


def test_a_pair_by_hand(tmp_path):
    pair = open_pairs(tmp_path, {"prompt": "a", "chosen": "01", "rejected": "2"})[0]
    assert lists(pair) == {
        "input_ids": [[2, 14, 3, 4, 5, 1], [2, 14, 3, 6, 1, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]],
        "loss_mask": [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]],
    }
    assert {value.dtype for value in pair.values()} == {torch.int64}


@pytest.mark.parametrize(
    "record, changes",
    [
        ({"prompt": [user("a")], "chosen": "01", "rejected": "2"}, {}),
        ({"prompt": "a", "chosen": [says("01")], "rejected": [says("2")]}, {}),
        ({"prompt": "a", "chosen": [user("a"), says("01")], "rejected": [user("a"), says("2")]}, {}),
        ({"chosen": [user("a"), says("01")], "rejected": [user("a"), says("2")]}, {"prompt_key": None}),
        ({"q": "a", "good": "01", "bad": "2"}, {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}),
    ],
)
def test_the_ways_to_write_a_pair_are_one(tmp_path, record, changes):
    pair = open_pairs(tmp_path, record, **changes)[0]
    assert pair["input_ids"].tolist() == [[2, 14, 3, 4, 5, 1], [2, 14, 3, 6, 1, 0]]
    assert pair["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]


def test_turns_of_the_prompt_are_context_and_all_later_ones_are_learned(tmp_path):
    prompt = [user("a"), says("0"), user("b")]
    record = {"prompt": prompt, "chosen": [says("1"), user("c"), says("2")], "rejected": "3"}
    pair = open_pairs(tmp_path, record)[0]
    # <user>a<assistant>0<eos><user>b<assistant>1<eos><user>c<assistant>2<eos>
    assert pair["input_ids"][0].tolist() == [2, 14, 3, 4, 1, 2, 15, 3, 5, 1, 2, 16, 3, 6, 1]
    assert pair["loss_mask"][0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert pair["loss_mask"][1].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "template, end", [(QWEN, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (GEMMA, "<end_of_turn>"), (QWEN_THINKING, None)]
)
def test_every_template(tmp_path, template, end):
    tokenizer = tokenizer_with(template)
    prompt = [user("How?"), says("So."), user("Why?")]
    dataset = open_pairs(
        tmp_path, {"prompt": prompt, "chosen": "Because.", "rejected": "No idea"}, tokenizer=tokenizer, max_length=400
    )
    pair = dataset[0]
    for side, text in enumerate(("Because.", "No idea")):
        whole = tokenizer.apply_chat_template([*prompt, says(text)], tokenize=False)
        ids = pair["input_ids"][side][pair["attention_mask"][side].bool()]
        assert ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
        learned = tokenizer.decode(pair["input_ids"][side][pair["loss_mask"][side].bool()])
        assert learned == (f"{text}{end}" if end else f"<think>\n\n</think>\n\n{text}<|im_end|>")


def test_a_context_that_the_template_rewrites_is_no_obstacle(tmp_path):
    # With thinking off this template writes the thought into the header of the open turn alone: the
    # earlier answer cannot be learned from, but as context of a pair it can stand.
    tokenizer = tokenizer_with(QWEN_THINKING)
    prompt = [user("How?"), says("So."), user("Why?")]
    kwargs = {"apply_chat_template_kwargs": {"enable_thinking": False}, "max_length": 400}
    pair = open_pairs(tmp_path, {"prompt": prompt, "chosen": "x", "rejected": "y"}, tokenizer=tokenizer, **kwargs)[0]
    assert tokenizer.decode(pair["input_ids"][0][pair["loss_mask"][0].bool()]) == "x<|im_end|>"


def test_collate_pads_to_the_longest_side(tmp_path):
    dataset = open_pairs(
        tmp_path, {"prompt": "a", "chosen": "0", "rejected": "1"}, {"prompt": "b", "chosen": "01", "rejected": "2"}
    )
    batch = pair_collate_fn(TOKENIZER, config())([dataset[0], dataset[1]])
    assert lists(batch) == {
        "input_ids": [[[2, 14, 3, 4, 1, 0], [2, 14, 3, 5, 1, 0]], [[2, 15, 3, 4, 5, 1], [2, 15, 3, 6, 1, 0]]],
        "attention_mask": [[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]],
        "position_ids": [[[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 4]], [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]]],
        "loss_mask": [[[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0]], [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]],
    }


def test_left_cut_takes_the_same_tokens_from_both_prompts(tmp_path):
    # <user>abcd<assistant>01<eos> has 9 tokens, the other side 8; at most 7: both lose <user> and a.
    record = {"prompt": "abcd", "chosen": "01", "rejected": "2"}
    pair = open_pairs(tmp_path, record, max_length=7, truncation="left")[0]
    assert pair["input_ids"].tolist() == [[15, 16, 17, 3, 4, 5, 1], [15, 16, 17, 3, 6, 1, 0]]
    assert pair["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0]]


def test_left_cut_never_touches_a_response(tmp_path):
    record = {"prompt": "ab", "chosen": "01234", "rejected": "2"}  # prompt: <user>ab<assistant>
    kept = open_pairs(tmp_path, record, max_length=7, truncation="left")[0]
    assert kept["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 1], [3, 6, 1, 0, 0, 0, 0]]
    with pytest.raises(DataError, match=r"row 0: chosen has 10 tokens and rejected 6.*the prompt alone.* 4 tokens"):
        open_pairs(tmp_path, record, max_length=6, truncation="left")


def test_right_cut_leaves_neither_side_finished(tmp_path):
    # The chosen side loses its end, so the rejected one, which would fit, loses its <eos>.
    record = {"prompt": "a", "chosen": "0123", "rejected": "45"}
    pair = open_pairs(tmp_path, record, max_length=6, truncation="right")[0]
    assert pair["input_ids"].tolist() == [[2, 14, 3, 4, 5, 6], [2, 14, 3, 8, 9, 0]]
    assert pair["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    "record, length, why",
    [
        ({"prompt": "abcd", "chosen": "0", "rejected": "1"}, 6, "nothing is left of a response"),
        ({"prompt": "a", "chosen": "0123", "rejected": "0124"}, 6, "the two responses agree so far"),
    ],
)
def test_a_right_cut_that_leaves_no_preference(tmp_path, record, length, why):
    with pytest.raises(DataError, match=rf"row 0: chosen has .*max_length={length}.*{why}"):
        open_pairs(tmp_path, record, max_length=length, truncation="right")


def test_long_pairs_are_an_error_at_opening(tmp_path):
    records = [{"prompt": "a", "chosen": "0" * n, "rejected": "1"} for n in (1, 5, 9)]
    with pytest.raises(DataError) as caught:
        open_pairs(tmp_path, *records, max_length=8)
    for part in ("2 of 3 pairs", "max_length=8", "row 1 with 9 tokens", "longest has 13", "left or right"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "record, says",
    [
        ({"prompt": "a", "chosen": "0"}, "has no column 'rejected' (rejected_key)"),
        ({"prompt": "a", "chosen": "0", "rejected": "0"}, "row 0: chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "0", "rejected": " \n"}, "row 0, rejected: the response is empty"),
        ({"prompt": "a", "chosen": "", "rejected": "0"}, "row 0, chosen: the response is empty"),
        ({"prompt": "a", "chosen": "0", "rejected": None}, "row 0, rejected: the prompt is NoneType"),
        ({"prompt": None, "chosen": "0", "rejected": "1"}, "row 0, prompt: the prompt is NoneType"),
        ({"prompt": "a", "chosen": "0", "rejected": [user("a")]}, "row 0, rejected: the last message must be"),
        # The prompt would stand there twice.
        ({"prompt": "a", "chosen": "0", "rejected": [user("a "), says("1")]}, "rejected: it begins with a message of"),
        ({"prompt": [says("a")], "chosen": "0", "rejected": "1"}, "row 0, chosen: the conversation begins with the"),
    ],
)
def test_a_pair_that_cannot_be_used(tmp_path, record, says):
    with pytest.raises(DataError) as caught:
        open_pairs(tmp_path, record)
    assert says in str(caught.value)


def test_conversations_that_share_nothing(tmp_path):
    record = {"chosen": [user("a"), says("0")], "rejected": [user("b"), says("0")]}
    with pytest.raises(DataError, match=r"share no prompt\. Set prompt_key"):
        open_pairs(tmp_path, record, prompt_key=None)


def test_probable_mistakes_are_warnings(tmp_path, caplog):
    open_pairs(
        tmp_path, {"prompt": "a", "chosen": "0", "rejected": "1<eos>"}, {"prompt": "a", "chosen": "0", "rejected": "2"}
    )
    [record] = caplog.records
    assert record.getMessage().startswith("1 of 2 pairs have the text of a special token inside a message")
    assert "pairs.jsonl, row 0 (<eos>)" in record.getMessage()


def test_sides_that_the_template_writes_alike(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content'] }}<eos>", "m['content'] | trim }}<eos>")
    with pytest.raises(DataError, match="writes both sides alike"):
        open_pairs(tmp_path, {"prompt": "a", "chosen": "0", "rejected": "0 "}, tokenizer=tokenizer)


def test_max_samples_chooses_by_the_seed(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "chosen": str(n), "rejected": "x"}) + "\n" for n in range(9)))
    first = RMDataset(str(path), TOKENIZER, config(shuffle=False), max_samples=2)
    assert [first[n]["input_ids"][0, 3].item() for n in range(2)] == [4, 5]
    chosen = [RMDataset(str(path), TOKENIZER, config(seed=3), max_samples=4).rows for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 4


def test_rows_with_videos_are_refused_without_a_processor(tmp_path):
    with pytest.raises(DataError, match=r"row 0: column 'videos' holds 1 item\(s\).*No image processor was given"):
        open_pairs(tmp_path, {"prompt": "a", "chosen": "01", "rejected": "2", "videos": ["a.mp4"]})
