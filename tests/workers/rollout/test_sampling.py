from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.testing.models import tiny_tokenizer
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.request import sample_seed
from verl.workers.rollout.sampling import StopRules, TokenSampler, inverse_cdf, kept_tokens, uniforms

F64 = torch.float64


def test_sample_seed_is_the_same_on_every_machine():
    # blake2b with 8 bytes of "42|7|3-0|1", big endian, without its lowest bit: computed once, written down here.
    assert sample_seed(42, 7, "3-0", 1) == 0x182DA6083E9CE2CF
    seeds = {sample_seed(g, s, u, i) for g in (1, 2) for s in (1, 2) for u in ("a", "b", 3) for i in range(4)}
    assert len(seeds) == 2 * 2 * 3 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_longer_draw_starts_alike():
    for short, long in ((1, 2), (3, 40), (16, 17), (20, 1000)):
        assert torch.equal(uniforms(5, long)[:short], uniforms(5, short))


def test_inverse_cdf_by_hand():
    # cdf of [.25 0 .5 .25] is .25 .25 .75 1: u < .25 → 0, .25 ≤ u < .75 → 2, else 3; token 1 never.
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=F64)
    for u, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (1 - 2**-53, 3)):
        assert inverse_cdf(probs, torch.tensor([u], dtype=F64)).tolist() == [token]
    assert inverse_cdf(8 * probs, torch.tensor([0.25], dtype=F64)).tolist() == [2]  # the sum need not be 1
    # The last tokens have probability 0: not even the largest u may reach them.
    assert inverse_cdf(torch.tensor([[0.3, 0.1, 0.0, 0.0]], dtype=F64), torch.tensor([1 - 2**-53], dtype=F64)) == 1


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (-1, 1.0, [1, 1, 1, 1, 1]),
        (0, 1.0, [1, 1, 1, 1, 1]),
        (1, 1.0, [0, 1, 0, 0, 0]),
        (2, 1.0, [1, 1, 0, 0, 0]),  # tokens 0, 2 and 3 are equal: the lower id comes first
        (3, 1.0, [1, 1, 1, 0, 0]),
        (99, 1.0, [1, 1, 1, 1, 1]),
        (-1, 0.001, [0, 1, 0, 0, 0]),  # the first token always stays
        (-1, 0.375, [0, 1, 0, 0, 0]),  # mass .375 reaches .375
        (-1, 0.376, [1, 1, 0, 0, 0]),
        (-1, 0.75, [1, 1, 1, 0, 0]),  # .375 + .1875 + .1875 = .75
        (3, 0.75, [1, 1, 0, 0, 0]),  # of the mass .75 of three tokens .5625 is the share .75
        (3, 0.76, [1, 1, 1, 0, 0]),
    ],
)
def test_kept_tokens_by_hand(top_k, top_p, kept):
    probs = torch.tensor([[0.1875, 0.375, 0.1875, 0.1875, 0.0625]], dtype=F64)
    got = kept_tokens(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=F64), torch.zeros(1, dtype=F64))
    assert got.int().tolist() == [kept]


@pytest.mark.parametrize(
    "min_p, top_k, top_p, kept",
    [
        (0.0, -1, 1.0, [1, 1, 1, 1, 1]),
        (0.2, -1, 1.0, [1, 1, 1, 1, 0]),  # .0625 is a sixth of .375
        (0.5, -1, 1.0, [1, 1, 1, 1, 0]),  # .1875 is half of .375, no less
        (0.51, -1, 1.0, [0, 1, 0, 0, 0]),
        (1.0, -1, 1.0, [0, 1, 0, 0, 0]),  # the first token always stays
        (0.5, 2, 1.0, [1, 1, 0, 0, 0]),  # the first two of four
        (0.51, 2, 1.0, [0, 1, 0, 0, 0]),
        (0.5, -1, 0.6, [1, 1, 0, 0, 0]),  # of the mass .9375 that is left .5625 is the share .6
        (0.0, -1, 0.6, [1, 1, 1, 0, 0]),  # of the mass 1 it is not
    ],
)
def test_min_p_by_hand(min_p, top_k, top_p, kept):
    probs = torch.tensor([[0.1875, 0.375, 0.1875, 0.1875, 0.0625]], dtype=F64)
    bounds = torch.tensor([top_k]), torch.tensor([top_p], dtype=F64), torch.tensor([min_p], dtype=F64)
    assert kept_tokens(probs, *bounds).int().tolist() == [kept]


def test_rows_have_their_own_parameters():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(3, 1)
    params = [
        SamplingParams(max_tokens=4, seed=1, temperature=0.0),
        SamplingParams(max_tokens=9, seed=2, temperature=2.0, top_k=1),
        SamplingParams(max_tokens=2, seed=3, temperature=0.5),
    ]
    sampler = TokenSampler(params, torch.device("cpu"))
    tokens, log_probs = sampler(logits, torch.arange(3), step=1)
    # log-probs: greedy at temperature 1; top_k=1 leaves one token, which is then certain.
    assert tokens[:2].tolist() == [3, 3]
    full = logits[0].double()
    torch.testing.assert_close(log_probs[0].double(), full.log_softmax(-1)[3])
    assert log_probs[1].item() == pytest.approx(0.0, abs=1e-7)
    expected = inverse_cdf((full[None] / 0.5).softmax(-1), uniforms(3, 2)[1:])
    assert tokens[2] == expected.item()
    # A subset of the rows, in any order, gets the same.
    again, _ = sampler(logits[:2], torch.tensor([2, 0]), step=1)
    assert again.tolist() == [tokens[2], tokens[0]]


def drawn(logits: torch.Tensor, raw: bool = False, count: int = 64, **params) -> dict[int, float]:
    """Log-prob of each token that comes up."""
    rows = [SamplingParams(**({"max_tokens": 1, "seed": i} | params)) for i in range(count)]
    tokens, log_probs = TokenSampler(rows, torch.device("cpu"), raw)(logits.repeat(count, 1), torch.arange(count), 0)
    return dict(zip(tokens.tolist(), log_probs.tolist(), strict=True))


def test_processed_log_probs_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    # top_k=2 keeps .5 and .25, of mass .75: 2/3 and 1/3.
    assert drawn(logits, top_k=2) == pytest.approx({0: math.log(2 / 3), 1: math.log(1 / 3)})
    # At temperature ½ the probabilities go as 16 4 1 1; top_p=.9 keeps 16 and 4 (20/22 > .9): .8 and .2.
    assert drawn(logits, temperature=0.5, top_p=0.9) == pytest.approx({0: math.log(0.8), 1: math.log(0.2)})
    # min_p=.3 keeps what has at least .15: .5 and .25 again; 1/2 of them is the first.
    assert drawn(logits, min_p=0.3) == pytest.approx({0: math.log(2 / 3), 1: math.log(1 / 3)})
    assert drawn(logits, min_p=0.3, top_k=1) == pytest.approx({0: 0.0}, abs=1e-7)
    # Nothing cut: the tempered softmax itself.
    assert drawn(logits, temperature=0.5)[0] == pytest.approx(math.log(16 / 22))


def test_kept_ids_by_hand(monkeypatch):
    logits = torch.tensor([[0.125, 0.5, 0.0, 0.25, 0.125]]).log()
    # top_k=2 keeps .5 and .25; min_p=.3 what has at least .15; top_p=.8 the shortest prefix of .5 .25 .125 with .8 of
    # the mass, of equal ones the lower id; top_k=5 is more than there are, but token 2 cannot be drawn; four do not
    # fit into three places; a greedy row keeps all.
    cuts = [{"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0, "top_k": 1}]
    sampler = TokenSampler([SamplingParams(max_tokens=1, seed=0, **cut) for cut in cuts], torch.device("cpu"))
    wide, narrow = (torch.full((5, width), -1, dtype=torch.int32) for width in (4, 3))
    for rows_at_once in (5, 2):
        monkeypatch.setattr("verl.workers.rollout.sampling._CHUNK_ELEMENTS", 5 * rows_at_once)
        plain = sampler(logits.repeat(5, 1), torch.arange(5), 0)
        masked = [sampler(logits.repeat(5, 1), torch.arange(5), 0, ids.fill_(-1)) for ids in (wide, narrow)]
        assert all(torch.equal(a, b) for both in masked for a, b in zip(plain, both, strict=True))
        everything = [0, 1, 3, 4]
        assert wide.tolist() == [[1, 3, -1, -1], [1, 3, -1, -1], [0, 1, 3, -1], everything, everything]
        assert narrow.tolist() == [[1, 3, -1], [1, 3, -1], [0, 1, 3], [-1, -1, -1], [-1, -1, -1]]


def test_raw_log_probs_are_those_of_the_models_own_logits():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    own = {0: math.log(0.5), 1: math.log(0.25)}
    assert drawn(logits, raw=True, top_k=2) == pytest.approx(own)
    assert drawn(logits, raw=True, top_k=2, temperature=0.5) == pytest.approx(own)
    whole = drawn(logits)
    assert len(whole) == 4
    assert drawn(logits, raw=True) == whole  # temperature 1 and nothing cut: the same to the last bit


def test_greedy_rows_are_not_cut_beside_others():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    params = [
        SamplingParams(max_tokens=1, seed=0, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0),
        SamplingParams(max_tokens=1, seed=0, top_k=1),
    ]
    tokens, log_probs = TokenSampler(params, torch.device("cpu"))(logits.repeat(2, 1), torch.arange(2), 0)
    assert tokens.tolist() == [0, 0]
    assert log_probs.tolist() == pytest.approx([math.log(0.5), 0.0], abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.floats(-4, 4), min_size=2, max_size=9),
    top_k=st.integers(-1, 9),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.2, 3.0),
)
def test_processed_log_probs_sum_to_one_over_the_kept_tokens(logits, top_k, top_p, min_p, temperature):
    row = torch.tensor([logits])
    probs = (row / temperature).double().softmax(-1)
    bounds = torch.tensor([top_k]), torch.tensor([top_p], dtype=F64), torch.tensor([min_p], dtype=F64)
    kept = kept_tokens((row / temperature).log_softmax(-1).double().exp(), *bounds)[0]
    expected = (probs[0] * kept / (probs[0] * kept).sum()).log()
    found = drawn(row, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, count=16)
    for token, log_prob in found.items():
        assert kept[token]
        assert log_prob == pytest.approx(expected[token].item(), abs=1e-5)


@pytest.mark.parametrize("is_raw", [False, True])
def test_log_probs_of_a_large_vocabulary_are_exact(is_raw):  # those of log_softmax in fp32 are off by some 1e-5
    logits = 3 * torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    sampler = TokenSampler([SamplingParams(max_tokens=1, seed=i) for i in range(4)], torch.device("cpu"), is_raw)
    tokens, log_probs = sampler(logits, torch.arange(4), 0)
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (log_probs - expected).abs().max() < 5e-6


def test_a_large_vocabulary_is_worked_on_in_parts(monkeypatch):
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    sampler = TokenSampler([SamplingParams(max_tokens=1, seed=i, top_p=0.8) for i in range(7)], torch.device("cpu"))
    whole = sampler(logits, torch.arange(7), 0)
    monkeypatch.setattr("verl.workers.rollout.sampling._CHUNK_ELEMENTS", 22)
    parts = sampler(logits, torch.arange(7), 0)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    top_k=st.integers(-1, 9),
    top_p=st.floats(0.01, 1.0),
)
def test_kept_tokens_against_the_slow_definition(weights, top_k, top_p):
    total = sum(weights)
    probs = torch.tensor([weights], dtype=F64) / total
    ranked = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    ranked = ranked[:top_k] if top_k > 0 else ranked
    mass = sum(weights[v] for v in ranked) / total
    kept, reached = set(), 0.0
    for v in ranked:
        if kept and top_p < 1 and reached >= top_p * mass - 1e-12:
            break
        kept.add(v)
        reached += weights[v] / total
    got = kept_tokens(probs, torch.tensor([top_k]), torch.tensor([top_p], dtype=F64), torch.zeros(1, dtype=F64))[0]
    on_the_edge = any(abs(sum(weights[w] for w in ranked[:i]) / total - top_p * mass) < 1e-9 for i in range(9))
    if not on_the_edge:
        assert set(got.nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("stop", ("",)),
    ],
)
def test_parameters_out_of_range_are_refused_with_their_bounds(field, value):
    good = SamplingParams(max_tokens=1, seed=0)
    with pytest.raises(ConfigError, match=f"sampling parameter {field}="):
        dataclasses.replace(good, **{field: value})


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_ids_that_are_never_drawn(greedy, raw):
    # p = (1, 2, 5) / 8 of ids 0, 1, 2, and id 2 does not exist: 1/3 and 2/3 are left.
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().repeat(300, 1)
    before = logits.clone()
    params = [SamplingParams(max_tokens=1, seed=i, temperature=0.0 if greedy else 1.0) for i in range(300)]
    sampler = TokenSampler(params, torch.device("cpu"), raw, never=[2])
    tokens, log_probs = sampler(logits, torch.arange(300), 0)
    assert set(tokens.tolist()) == ({1} if greedy else {0, 1})
    chances = torch.tensor([1 / 8, 2 / 8] if raw else [1 / 3, 2 / 3])
    torch.testing.assert_close(log_probs, chances.log()[tokens])
    assert torch.equal(logits, before)  # they belong to the engine


# ---- the end of a response

CPU = torch.device("cpu")


def run_rules(params, rows_of_tokens, eos=(1,), kind="char"):
    """Feed the tokens one column at a time; rows that ended stay in the batch, as they do until it is compacted."""
    tokenizer = tiny_tokenizer(kind)
    rules = StopRules(params, eos, tokenizer, CPU)
    tokens = torch.tensor(rows_of_tokens)
    rows, going = torch.arange(len(rows_of_tokens)), []
    for step in range(tokens.shape[1]):
        going.append(rules.unfinished(tokens, rows, step).tolist())
    return going, *rules.results()


def stop_params(**fields):
    return SamplingParams(**({"max_tokens": 4, "seed": 0} | fields))


def test_ends_by_hand():
    going, lengths, reasons = run_rules(
        [
            stop_params(),
            stop_params(max_tokens=2),
            stop_params(ignore_eos=True),
            stop_params(stop_token_ids=(7, 9)),
            stop_params(ignore_eos=True),
        ],
        [[5, 1, 1, 5], [5, 5, 1, 1], [1, 1, 1, 1], [7, 5, 5, 5], [5, 5, 5, 1]],
    )
    assert going == [[0, 1, 2, 4], [2, 4], [2, 4], []]
    assert lengths == [2, 2, 4, 1, 4]
    assert reasons == ["stop", "length", "length", "stop", "length"]


def test_an_end_token_in_the_last_place_is_a_stop():
    assert run_rules([stop_params(max_tokens=2)], [[5, 1]])[1:] == ([2], ["stop"])


def test_rows_that_have_not_ended_are_given_up_with_what_was_drawn():
    rules = StopRules([stop_params(), stop_params(max_tokens=2), stop_params()], (1,), tiny_tokenizer("char"), CPU)
    tokens = torch.tensor([[5, 5, 0, 0], [5, 5, 0, 0], [1, 0, 0, 0]])
    for step in range(2):
        rules.unfinished(tokens, torch.arange(3), step)
    assert rules.results(drawn_count=2) == ([2, 2, 1], ["abort", "length", "stop"])


def test_a_subset_of_rows_in_any_order():
    rules = StopRules([stop_params() for _ in range(4)], (1,), tiny_tokenizer("char"), CPU)
    tokens = torch.tensor([[5, 5], [1, 5], [5, 1], [5, 5]])
    assert rules.unfinished(tokens, torch.arange(4), 0).tolist() == [0, 2, 3]
    assert rules.unfinished(tokens, torch.tensor([3, 2, 0]), 1).tolist() == [0, 2]  # places, not rows


def test_a_stop_text_over_several_tokens():
    tokenizer = tiny_tokenizer("char")
    ids = [tokenizer.encode("x</a>yz", add_special_tokens=False), tokenizer.encode("</a</a>", add_special_tokens=False)]
    _, lengths, reasons = run_rules([stop_params(max_tokens=7, stop=("</a>", "no"))] * 2, ids)
    assert lengths == [5, 7]
    assert reasons == ["stop", "stop"]


def test_a_stop_text_inside_a_longer_token_and_after_half_a_character():
    tokenizer = tiny_tokenizer("bpe")
    ids = tokenizer.encode("é" * 9 + " The answer is", add_special_tokens=False)
    text = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    ends = next(i for i, t in enumerate(text) if "nsw" in t) + 1
    assert text[ends - 1].endswith("answer")  # the text ends inside of this token, which is kept whole
    assert run_rules([stop_params(max_tokens=len(ids), stop=("nsw",))], [ids], kind="bpe")[1] == [ends]
    two_bytes = tokenizer.encode("é", add_special_tokens=False)
    assert len(two_bytes) == 2
    assert run_rules([stop_params(max_tokens=9, stop=("é",))], [two_bytes * 4], kind="bpe")[1] == [2]
