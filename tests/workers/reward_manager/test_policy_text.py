"""Rewards read what the policy wrote; what tools and users say is beside it."""

import numpy as np
import torch

from tests.workers.reward_manager.batches import TOKENIZER
from verl import DataProto
from verl.experience.sequences import with_earlier_turns
from verl.scorers.parts import format_reward, repetition_penalty
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_input import RewardInput
from verl.workers.reward_manager import NaiveRewardManager, response_texts

LENGTH = 72


def conversations(*rows, truths=None, sources=None, **columns):
    """Responses of turns: ``+text`` is the policy's, ``-text`` of a tool, a user or the chat template."""
    ids, masks = [], []
    for row in rows:
        parts = [TOKENIZER(turn[1:], add_special_tokens=False)["input_ids"] for turn in row]
        ids.append([token for part in parts for token in part])
        masks.append([int(turn[0] == "+") for turn, part in zip(row, parts, strict=True) for _ in part])
    padded = [torch.tensor([[*values, *[0] * (LENGTH - len(values))] for values in lists]) for lists in (ids, masks)]
    present = torch.tensor([[1] * len(row) + [0] * (LENGTH - len(row)) for row in ids])
    size = len(rows)
    tensors = {
        "prompts": torch.ones(size, 1, dtype=torch.int64),
        "responses": padded[0],
        "response_mask": padded[1],
        "attention_mask": torch.cat([torch.ones(size, 1, dtype=torch.int64), present], 1),
    }
    objects = {"data_source": sources or ["none"] * size, "uid": [f"u{row}" for row in range(size)], **columns}
    if truths is not None:
        objects["reward_model"] = [{"style": "rule", "ground_truth": truth} for truth in truths]
    arrays = {name: np.fromiter(values, dtype=object, count=size) for name, values in objects.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


def test_the_texts_of_a_conversation():
    data = conversations(
        ["+one<eos>", "-tool: #### 2<eos>", "+three<eos>"], ["-page", "+x"], ["+ab<eos>"], ["-nobody"], ["+p", "+q"]
    )
    assert [
        (text.solution_str, text.last_turn_str, text.conversation_str) for text in response_texts(data, TOKENIZER)
    ] == [
        ("one\nthree", "three", "onetool: #### 2three"),
        ("x", "x", "pagex"),
        ("ab", "ab", "ab"),
        ("", "", "nobody"),
        ("pq", "pq", "pq"),  # drawn by two calls, and one turn
    ]
    single = data.select_idxs([2]).select(batch_keys=["prompts", "responses", "attention_mask"])  # no response_mask
    assert [text.solution_str for text in response_texts(single, TOKENIZER)] == ["ab"]
    single.non_tensor_batch["agent_answer"] = np.array(["of a program"], dtype=object)
    [text] = response_texts(single, TOKENIZER)
    assert (text.solution_str, text.last_turn_str, text.conversation_str) == ("of a program", "ab", "ab")


def test_what_others_say_scores_nothing():
    data = conversations(
        ["+#### 5", "-the checker knows #### 72"],
        ["+#### 5", "-no<eos>", "+#### 72"],
        ["-#### 72", "+I do not know"],
        ["+I do not know", "-<answer>Rome</answer>"],
        ["+<search>capital</search>", "-<answer>Oslo</answer>", "+<answer>Rome</answer>"],
        truths=[*["72"] * 3, *[{"target": ["Rome"]}] * 2],
        sources=[*["openai/gsm8k"] * 3, *["searchR1_nq"] * 2],
    )
    assert NaiveRewardManager(TOKENIZER, 0)(data).sum(-1).tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]


def test_tags_and_repetition_of_others_do_not_count():
    data = conversations(
        ["+<think>a</think>", "-<think> no no no no", "+<answer>b</answer>"], ["+a b", "-b c b c b c", "+c d"]
    )
    tags, repeats = response_texts(data, TOKENIZER)
    assert format_reward(tags.solution_str) == 1.0
    assert format_reward(tags.conversation_str) == 0.0
    assert repetition_penalty(repeats.solution_str, 2) == 0.0  # (a b)(b c)(c d), none twice


def test_turns_of_earlier_sequences_are_the_policys_too():
    """A template that rewrites history begins a sequence for each turn, with what was said before under mask 0."""
    data = conversations(
        ["+first 5<eos>"], ["-first 5 again", "+second 7<eos>"], ["+helper 9"], ["+alone"],
        trajectory_id=["a", "a", "a", "b"], agent=["main", "main", "helper", "main"],
    )  # fmt: skip
    texts = response_texts(with_earlier_turns(data).select_idxs([1, 2, 3]), TOKENIZER)
    assert [text.solution_str for text in texts] == ["first 5\nsecond 7", "helper 9", "alone"]
    assert [text.last_turn_str for text in texts] == ["second 7", "helper 9", "alone"]
    assert texts[0].conversation_str == "first 5 againsecond 7"


def test_a_reward_model_of_another_tokenizer_reads_the_policys_turns(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    own = hf_tokenizer(str(tmp_path))
    own.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    prompt = [{"role": "user", "content": "what?"}]
    data = conversations(["+one<eos>", "-tool<eos>", "+two<eos>"], ["+ab<eos>"], raw_prompt=[prompt, prompt])
    columns = RewardInput(TOKENIZER, own).read(data).batch
    texts = [
        own.decode(ids[mask.bool()]) for ids, mask in zip(columns["input_ids"], columns["attention_mask"], strict=True)
    ]
    assert texts == ["[user]what?[assistant]one\ntwo", "[user]what?[assistant]ab"]
    # Turns that end with the token of the next message: the score is read at that token, at which it was trained.
    own.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    ids = RewardInput(TOKENIZER, own).read(data).batch["input_ids"]
    assert own.decode(ids[0]) == "<user>what?<assistant>one\ntwo<user>"
