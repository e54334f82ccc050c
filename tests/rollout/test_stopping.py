from __future__ import annotations

import torch

from tests.models import tiny_tokenizer
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.stopping import StopRules

CPU = torch.device("cpu")


def run(params, rows_of_tokens, eos=(1,), kind="char"):
    """Feed the tokens one column at a time; rows that ended stay in the batch, as they do until it is compacted."""
    tokenizer = tiny_tokenizer(kind)
    rules = StopRules(params, eos, tokenizer, CPU)
    tokens = torch.tensor(rows_of_tokens)
    rows, going = torch.arange(len(rows_of_tokens)), []
    for step in range(tokens.shape[1]):
        going.append(rules.going_on(tokens, rows, step).tolist())
    return going, *rules.results()


def params(**fields):
    return SamplingParams(**({"max_tokens": 4, "seed": 0} | fields))


def test_ends_by_hand():
    going, lengths, reasons = run(
        [
            params(),
            params(max_tokens=2),
            params(ignore_eos=True),
            params(stop_token_ids=(7, 9)),
            params(ignore_eos=True),
        ],
        [[5, 1, 1, 5], [5, 5, 1, 1], [1, 1, 1, 1], [7, 5, 5, 5], [5, 5, 5, 1]],
    )
    assert going == [[0, 1, 2, 4], [2, 4], [2, 4], []]
    assert lengths == [2, 2, 4, 1, 4]
    assert reasons == ["stop", "length", "length", "stop", "length"]


def test_an_end_token_in_the_last_place_is_a_stop():
    assert run([params(max_tokens=2)], [[5, 1]])[1:] == ([2], ["stop"])


def test_rows_that_have_not_ended_are_given_up_with_what_was_drawn():
    rules = StopRules([params(), params(max_tokens=2), params()], (1,), tiny_tokenizer("char"), CPU)
    tokens = torch.tensor([[5, 5, 0, 0], [5, 5, 0, 0], [1, 0, 0, 0]])
    for step in range(2):
        rules.going_on(tokens, torch.arange(3), step)
    assert rules.results(drawn=2) == ([2, 2, 1], ["abort", "length", "stop"])


def test_a_subset_of_rows_in_any_order():
    rules = StopRules([params() for _ in range(4)], (1,), tiny_tokenizer("char"), CPU)
    tokens = torch.tensor([[5, 5], [1, 5], [5, 1], [5, 5]])
    assert rules.going_on(tokens, torch.arange(4), 0).tolist() == [0, 2, 3]
    assert rules.going_on(tokens, torch.tensor([3, 2, 0]), 1).tolist() == [0, 2]  # places, not rows


def test_a_stop_text_over_several_tokens():
    tokenizer = tiny_tokenizer("char")
    ids = [tokenizer.encode("x</a>yz", add_special_tokens=False), tokenizer.encode("</a</a>", add_special_tokens=False)]
    _, lengths, reasons = run([params(max_tokens=7, stop=("</a>", "no"))] * 2, ids)
    assert lengths == [5, 7]
    assert reasons == ["stop", "stop"]


def test_a_stop_text_inside_a_longer_token_and_after_half_a_character():
    tokenizer = tiny_tokenizer("bpe")
    ids = tokenizer.encode("é" * 9 + " The answer is", add_special_tokens=False)
    text = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    ends = next(i for i, t in enumerate(text) if "nsw" in t) + 1
    assert text[ends - 1].endswith("answer")  # the text ends inside of this token, which is kept whole
    assert run([params(max_tokens=len(ids), stop=("nsw",))], [ids], kind="bpe")[1] == [ends]
    two_bytes = tokenizer.encode("é", add_special_tokens=False)
    assert len(two_bytes) == 2
    assert run([params(max_tokens=9, stop=("é",))], [two_bytes * 4], kind="bpe")[1] == [2]
